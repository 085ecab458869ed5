# shellcheck shell=bash
# Turns a Slurm allocation into one training run; the .sbatch files of this folder source it and call `job`:
#   job USER VARIANT_FLAG... -- [llama2|llama3|train TRAINING_FLAG...]
#
# Words after `--` are those after the script's name in `sbatch`. A script that sbatch reads from a pipe gets none, so these
# variables do the same. An unset variable adds no flag; if a flag is given twice, the last one counts.
# The first four lines describe one run: a sweep does not pass them to its cells (OF_ONE_RUN in launch/sweep_run.py).
#   FAMILY MODEL DATA LENGTH MAX_STEPS OUTPUT_DIR   llama2, llama3 or train, and the most common flags
#   GLOBAL_BATCH                                    sequences per step; sets the gradient accumulation
#   MICRO_BATCH SEQUENCE_PARALLEL                   sequences per forward pass, ranks that share a sequence
#   FLAGS_FILE                                      file with further flags, one word per line
#   NPROC PYTHON                                    processes per node, interpreter
#   CONTAINER                                       environment (.toml) or image to run in, see docs/launching.md
#   REQUEUE                                         1 restarts the job after a failure, or SIGUSR1, from its checkpoint

refuse() {
    echo "${SLURM_JOB_NAME:-launch/slurm}: error: $*" >&2
    exit 2
}

# Prints the value of a variable if it is a whole number that is safe in arithmetic: not 0, octal, or too long.
whole() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || refuse "$1 '$2' is not a whole number above 0"
    ((${#2} < 10)) || refuse "$1 $2 is too large; give at most 999999999"
    echo "$2"
}

# Succeeds if a flag is among the words after it, as `--flag value` or `--flag=value`, with hyphens or underscores.
given() {
    local flag=$1 word
    shift
    for word in "$@"; do
        word=${word%%=*}
        [[ ${word//-/_} == "${flag//-/_}" ]] && return 0
    done
    return 1
}

# Adds the flags for a step of GLOBAL_BATCH sequences on $1 processes to the array `flags`.
add_batch_flags() {
    local processes=$1 micro global sequence data_ranks pass
    micro=$(whole MICRO_BATCH "${MICRO_BATCH:-1}")
    sequence=$(whole SEQUENCE_PARALLEL "${SEQUENCE_PARALLEL:-$processes}")
    ((processes % sequence == 0)) || refuse "SEQUENCE_PARALLEL $sequence does not divide the $processes processes"
    data_ranks=$((processes / sequence))
    pass=$((micro * data_ranks))
    global=$(whole GLOBAL_BATCH "${GLOBAL_BATCH:-$pass}")
    ((global % pass == 0)) ||
        refuse "GLOBAL_BATCH $global is not a multiple of $pass, the sequences of one pass (MICRO_BATCH $micro x" \
            "$data_ranks data ranks); give $(nearest "$global" "$pass")"
    flags+=(
        --sequence_parallel_size "$sequence"
        --per_device_train_batch_size "$micro"
        --gradient_accumulation_steps "$((global / pass))"
    )
}

# Prints the multiples of $2 next to $1, without 0.
nearest() {
    local below=$(($1 / $2 * $2))
    if ((below > 0)); then echo "$below or $((below + $2))"; else echo "$2"; fi
}

# Prints the number of GPUs that srun gives each node; nothing if it is unknown. In an exclusive job, SLURM_GPUS_ON_NODE
# counts all GPUs of the node, also if --gpus-per-node (a number, or TYPE:NUMBER) asks for fewer.
gpus_per_node() {
    local gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    echo "${gpus##*:}"
}

# Prints the number of processes on all nodes. Called only if it is needed, since it may be unknown.
count_processes() {
    local per_node=${NPROC:-}
    per_node=${per_node:-$(gpus_per_node)}
    [[ -n $per_node ]] || refuse "the number of GPUs per node is unknown here; set NPROC"
    per_node=$(whole NPROC "$per_node")
    echo $(($1 * per_node))
}

# Adds the flags of the variables to the array `flags`.
add_variable_flags() {
    local nodes=$1 processes name
    [[ -z ${MODEL:-} ]] || flags+=(--model_name_or_path "$MODEL")
    [[ -z ${DATA:-} ]] || flags+=(--data_path "$DATA")
    [[ -z ${LENGTH:-} ]] || flags+=(--model_max_length "$LENGTH")
    [[ -z ${MAX_STEPS:-} ]] || flags+=(--max_steps "$MAX_STEPS")
    for name in GLOBAL_BATCH MICRO_BATCH SEQUENCE_PARALLEL; do
        if [[ -n ${!name:-} ]]; then
            processes=$(count_processes "$nodes")
            add_batch_flags "$processes"
            break
        fi
    done
}

# Adds the words of FLAGS_FILE to the array `flags`. There is one per line, so that none needs quotes.
add_file_flags() {
    local words=()
    [[ -z ${FLAGS_FILE:-} ]] && return
    [[ -f $FLAGS_FILE ]] || refuse "no FLAGS_FILE $FLAGS_FILE in $PWD"
    mapfile -t words <"$FLAGS_FILE"
    flags+=("${words[@]}")
}

# Refuses batch flags beside the variables that set them, because only one of the two could hold.
check_batch_flags() {
    local flag name
    for name in GLOBAL_BATCH MICRO_BATCH SEQUENCE_PARALLEL; do
        [[ -n ${!name:-} ]] || continue
        for flag in --gradient_accumulation_steps --per_device_train_batch_size --sequence_parallel_size; do
            ! given "$flag" "$@" || refuse "$flag is set by $name; give one of the two"
        done
    done
}

# REQUEUE=1 lets the job restart; it resumes from its newest checkpoint.
add_requeue_flags() {
    case "${REQUEUE:-0}" in
    0) return ;;
    1) ;;
    *) refuse "REQUEUE '$REQUEUE' is neither 1 nor 0" ;;
    esac
    scontrol update "JobId=$SLURM_JOB_ID" Requeue=1 || refuse "scontrol does not let this job be requeued"
    if ((${SLURM_RESTART_COUNT:-0} == 0)); then
        return
    fi
    # Before its first checkpoint, the run resumes from the one that was given.
    if has_saved "$(output_directory)" || ! given --resume_from_checkpoint "${flags[@]}"; then
        flags+=(--resume_from_checkpoint auto)
    fi
}

# Prints the run's last --output_dir.
output_directory() {
    local word previous='' directory=''
    for word in "${flags[@]}"; do
        case ${previous//-/_} in __output_dir) directory=$word ;; esac
        case $word in --output_dir=* | --output-dir=*) directory=${word#*=} ;; esac
        previous=$word
    done
    echo "$directory"
}

# Succeeds if the directory $1 has a checkpoint; with a file $2, if it has one that is newer.
has_saved() {
    find "$1" -mindepth 2 -maxdepth 2 -name trainer_state.json ${2:+-newer "$2"} 2>/dev/null |
        grep -Eq '/checkpoint-[0-9]+/trainer_state.json$'
}

# Runs the command. If it fails or SIGUSR1 stops it, requeues the job, provided that this start has saved a checkpoint: a
# run that makes no progress would be restarted for ever. Slurm itself requeues a job only when it finds a node down.
run_and_requeue() {
    local directory started=$1 step status=0
    directory=$(output_directory)
    "${command[@]}" &
    step=$!
    trap 'kill -USR1 "$step"' USR1 # of sbatch --signal=B:USR1@300, which reaches this shell only
    wait "$step" || status=$?
    while kill -0 "$step" 2>/dev/null; do # the signal ended the wait
        status=0
        wait "$step" || status=$?
    done
    ((status != 0)) || exit 0
    if has_saved "$directory" "$started" && ! grep -Eq '"reason": "SIG(TERM|INT|HUP|QUIT)"' "$directory/run.json"; then
        echo "launch: exit status $status; the job is requeued and resumes"
        scontrol requeue "$SLURM_JOB_ID" || true # Slurm may have done so, because a node is down
    fi
    exit "$status"
}

# Sets the array `launcher`: number of processes and rendezvous. A container has its own interpreter.
set_launcher() {
    local hosts=("$@") python=${PYTHON:-} gpus
    gpus=$(gpus_per_node)
    if [[ -z $python ]]; then
        python=python3
        [[ -z ${CONTAINER:-} && -x .venv/bin/python ]] && python=$PWD/.venv/bin/python
    fi
    launcher=("$python" -m torch.distributed.run "--nnodes=${#hosts[@]}")
    launcher+=("--nproc_per_node=${NPROC:-${gpus:-gpu}}")
    if ((${#hosts[@]} == 1)); then
        launcher+=(--standalone)
        return
    fi
    # Two jobs may share a head node, so the port comes from the job's number, below the ephemeral range.
    launcher+=(
        --rdzv_backend=c10d
        "--rdzv_id=$SLURM_JOB_ID"
        "--rdzv_endpoint=${hosts[0]}:$((20000 + SLURM_JOB_ID % 10000))"
    )
}

# Sets the array `step`: srun starts one launcher per node.
set_step() {
    local nodes=$1 logs=$2
    step=(
        srun
        "--nodes=$nodes"
        --ntasks-per-node=1
        # A failed node ends the job at once, so that the others do not wait for it.
        --kill-on-bad-exit=1
        # The task launches several processes, so do not bind it to one CPU.
        --cpu-bind=none
        # srun opens each node's log, because Slurm does not create the folder of a job's own output file.
        "--output=$logs/%N.log"
        --open-mode=append
    )
    case "${CONTAINER:-}" in
    *.toml | *.sqsh) [[ -f $CONTAINER ]] || refuse "no CONTAINER $CONTAINER in $PWD" ;;
    esac
    case "${CONTAINER:-}" in
    "") ;;
    *.toml) step+=("--environment=$(realpath "$CONTAINER")") ;;
    *) step+=("--container-image=$CONTAINER" "--container-mounts=$PWD:$PWD" "--container-workdir=$PWD") ;;
    esac
}

job() {
    set -euo pipefail
    shopt -s inherit_errexit # a refusal inside $(...) ends the job too
    local user=$1 variant=() flags=() program=() file launcher=() step=() command=() hosts=() family=${FAMILY:-} place logs of_variables
    shift
    while [[ $1 != -- ]]; do variant+=("$1") && shift; done
    shift
    (($# == 0)) || { family=$1 && shift; }
    case "$family" in
    llama2 | llama3) program=("$family/train.py") file=$family/train.py ;;
    train) program=(-m lightseq train) file=lightseq/__main__.py ;;
    "") refuse "name the program first: sbatch SCRIPT llama2|llama3|train TRAINING_FLAG..., or set FAMILY" ;;
    *) refuse "unknown program '$family'; llama2, llama3 or train" ;;
    esac
    [[ -n ${SLURM_JOB_ID:-} ]] || refuse "not inside a Slurm job; submit it with sbatch, or use launch/local.sh"
    [[ -f $file ]] || refuse "no $file in $PWD; submit from the repository root"

    mapfile -t hosts < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}")
    [[ -n ${hosts[0]:-} ]] || refuse "scontrol names no host for '${SLURM_JOB_NODELIST:-}'"

    place=${user:+$user/}$SLURM_JOB_NAME-$SLURM_JOB_ID
    flags=(--output_dir "${OUTPUT_DIR:-outputs/$place}")
    add_variable_flags "${#hosts[@]}"
    of_variables=${#flags[@]}
    flags+=("${variant[@]}")
    add_file_flags
    flags+=("$@")
    check_batch_flags "${flags[@]:of_variables}"
    add_requeue_flags

    logs=logs/$place
    set_launcher "${hosts[@]}"
    set_step "${#hosts[@]}" "$logs"
    mkdir -p "$logs"
    # Threads for tokenization and the optimizer on the host; the launcher's default is one.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
    # On a signal the launcher forwards it and kills ranks after this time, which a step and its checkpoint need.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
    export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
    command=("${step[@]}" "${launcher[@]}" "${program[@]}" "${flags[@]}")
    echo "launch: nodes ${#hosts[@]}, head ${hosts[0]}, logs in $logs/"
    printf 'launch:%s\n' "$(printf ' %q' "${command[@]}")" | tee -a "$logs/command.log"
    [[ ${REQUEUE:-0} == 0 ]] || run_and_requeue "$logs/command.log"
    exec "${command[@]}"
}

# Runs a job of the attention and FSDP experiments, which compare variants of one run on one node.
experiment() {
    : "${FAMILY:=llama3}" "${MODEL:=llama3.2-1b}" "${DATA:=data/zipf}" "${LENGTH:=4096}" "${MAX_STEPS:=50}"
    : "${GLOBAL_BATCH:=32}" "${MICRO_BATCH:=1}" "${SEQUENCE_PARALLEL:=1}"
    local user=$1
    shift
    job "$user" --random_init True --bf16 True --save_strategy no "$@"
}
