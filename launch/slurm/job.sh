# shellcheck shell=bash
# Turns a Slurm allocation into one training run; the .sbatch files of this folder source it and call `job`:
#   job USER VARIANT_FLAG... -- [llama2|llama3 TRAINING_FLAG...]
#
# Words after `--` are those after the script's name in `sbatch`. A script that sbatch reads from a pipe gets none, so all
# that matters has a variable as well. One that is unset adds no flag; of a flag given twice the last counts.
# Those of the first four lines are about one run: a sweep keeps them from its cells (OF_ONE_RUN in launch/sweep_run.py).
#   FAMILY MODEL DATA LENGTH MAX_STEPS OUTPUT_DIR   llama2 or llama3, and what most runs say by flags
#   GLOBAL_BATCH                                    sequences of a step; the accumulation is worked out
#   MICRO_BATCH SEQUENCE_PARALLEL                   sequences of a forward pass, ranks that share a sequence
#   FLAGS_FILE                                      a file of further flags, one word a line
#   NPROC PYTHON                                    processes of a node, the interpreter
#   CONTAINER                                       an environment (.toml) or image to run in, see docs/launching.md
#   REQUEUE                                         1 lets Slurm start the job again after a node failed

refuse() {
    echo "${SLURM_JOB_NAME:-launch/slurm}: error: $*" >&2
    exit 2
}

# The value of a variable, if arithmetic can rely on it: neither empty, 0, octal, nor too long to multiply.
whole() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || refuse "$1 '$2' is not a whole number above 0"
    ((${#2} < 10)) || refuse "$1 $2 is too large; give at most 999999999"
    echo "$2"
}

# Whether a flag is among the words after it, as `--flag value` or `--flag=value`, with hyphens for underscores or without.
given() {
    local flag=$1 word
    shift
    for word in "$@"; do
        word=${word%%=*}
        [[ ${word//-/_} == "${flag//-/_}" ]] && return 0
    done
    return 1
}

# Flags that make a step of GLOBAL_BATCH sequences on so many processes, into the array `flags`.
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

# The multiples of a number around another, leaving out 0.
nearest() {
    local below=$(($1 / $2 * $2))
    if ((below > 0)); then echo "$below or $((below + $2))"; else echo "$2"; fi
}

# Processes of all nodes; only asked where they have to be counted.
count_processes() {
    local per_node=${NPROC:-${SLURM_GPUS_ON_NODE:-}}
    [[ -n $per_node ]] || refuse "GPUs of a node are not known here; set NPROC"
    per_node=$(whole NPROC "$per_node")
    echo $(($1 * per_node))
}

# What the variables ask for, into the array `flags`.
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

# Words of FLAGS_FILE, into the array `flags`: one a line, so that none has to be quoted.
add_file_flags() {
    local words=()
    [[ -z ${FLAGS_FILE:-} ]] && return
    [[ -f $FLAGS_FILE ]] || refuse "no FLAGS_FILE $FLAGS_FILE in $PWD"
    mapfile -t words <"$FLAGS_FILE"
    flags+=("${words[@]}")
}

# A batch that is worked out and given as well would hold only one of the two.
check_batch_flags() {
    local flag name
    for name in GLOBAL_BATCH MICRO_BATCH SEQUENCE_PARALLEL; do
        [[ -n ${!name:-} ]] || continue
        for flag in --gradient_accumulation_steps --per_device_train_batch_size --sequence_parallel_size; do
            ! given "$flag" "$@" || refuse "$flag is worked out from $name; give one of the two"
        done
    done
}

# REQUEUE=1 lets Slurm start the job again after a node failed or was taken; it then goes on from its newest checkpoint.
add_requeue_flags() {
    case "${REQUEUE:-0}" in
    0) return ;;
    1) ;;
    *) refuse "REQUEUE '$REQUEUE' is neither 1 nor 0" ;;
    esac
    scontrol update "JobId=$SLURM_JOB_ID" Requeue=1 || refuse "scontrol does not let this job be requeued"
    ((${SLURM_RESTART_COUNT:-0} == 0)) || flags+=(--resume_from_checkpoint auto)
}

# Where the processes meet and how many there are, into the array `launcher`. In a container the interpreter is its own.
set_launcher() {
    local hosts=("$@") python=${PYTHON:-}
    if [[ -z $python ]]; then
        python=python3
        [[ -z ${CONTAINER:-} && -x .venv/bin/python ]] && python=$PWD/.venv/bin/python
    fi
    launcher=("$python" -m torch.distributed.run "--nnodes=${#hosts[@]}")
    launcher+=("--nproc_per_node=${NPROC:-${SLURM_GPUS_ON_NODE:-gpu}}")
    if ((${#hosts[@]} == 1)); then
        launcher+=(--standalone)
        return
    fi
    # Two jobs may share a head node: the port comes from the job's number, below the range systems hand out.
    launcher+=(
        --rdzv_backend=c10d
        "--rdzv_id=$SLURM_JOB_ID"
        "--rdzv_endpoint=${hosts[0]}:$((20000 + SLURM_JOB_ID % 10000))"
    )
}

# How srun starts one launcher a node, into the array `step`.
set_step() {
    local nodes=$1 logs=$2
    step=(
        srun
        "--nodes=$nodes"
        --ntasks-per-node=1
        # A node that fails ends the job at once instead of leaving the others to wait for it.
        --kill-on-bad-exit=1
        # The task is a launcher of several processes: not to be bound to the one CPU of one task.
        --cpu-bind=none
        # Slurm makes no folder for a job's own output file, so each node's log is opened by srun, once there is one.
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
    shopt -s inherit_errexit # a refusal inside $(...) ends the job as well
    local user=$1 variant=() flags=() launcher=() step=() command=() hosts=() family=${FAMILY:-} place logs worked_out
    shift
    while [[ $1 != -- ]]; do variant+=("$1") && shift; done
    shift
    (($# == 0)) || { family=$1 && shift; }
    case "$family" in
    llama2 | llama3) ;;
    "") refuse "name the model family first: sbatch SCRIPT llama2|llama3 TRAINING_FLAG..., or set FAMILY" ;;
    *) refuse "unknown model family '$family'; llama2 or llama3" ;;
    esac
    [[ -n ${SLURM_JOB_ID:-} ]] || refuse "not inside a Slurm job; submit it with sbatch, or use launch/local.sh"
    [[ -f $family/train.py ]] || refuse "no $family/train.py in $PWD; submit from the repository root"

    mapfile -t hosts < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}")
    [[ -n ${hosts[0]:-} ]] || refuse "scontrol names no host for '${SLURM_JOB_NODELIST:-}'"

    place=${user:+$user/}$SLURM_JOB_NAME-$SLURM_JOB_ID
    flags=(--output_dir "${OUTPUT_DIR:-outputs/$place}")
    add_variable_flags "${#hosts[@]}"
    worked_out=${#flags[@]}
    flags+=("${variant[@]}")
    add_file_flags
    flags+=("$@")
    check_batch_flags "${flags[@]:worked_out}"
    add_requeue_flags

    logs=logs/$place
    set_launcher "${hosts[@]}"
    set_step "${#hosts[@]}" "$logs"
    mkdir -p "$logs"
    # Threads for tokenising and the optimizer on the host; the launcher's own default is one.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
    # Asked to stop, the launcher passes the signal on, and ends ranks that last longer: a step and its checkpoint need that time.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
    export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
    command=("${step[@]}" "${launcher[@]}" "$family/train.py" "${flags[@]}")
    echo "launch: nodes ${#hosts[@]}, head ${hosts[0]}, logs in $logs/"
    printf 'launch:%s\n' "$(printf ' %q' "${command[@]}")" | tee -a "$logs/command.log"
    exec "${command[@]}"
}

# A job of the attention and FSDP experiments, which compare a few variants of one run on one node.
experiment() {
    : "${FAMILY:=llama3}" "${MODEL:=llama3.2-1b}" "${DATA:=data/zipf}" "${LENGTH:=4096}" "${MAX_STEPS:=50}"
    : "${GLOBAL_BATCH:=32}" "${MICRO_BATCH:=1}" "${SEQUENCE_PARALLEL:=1}"
    local user=$1
    shift
    job "$user" --random_init True --bf16 True --save_strategy no "$@"
}
