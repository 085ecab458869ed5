#!/usr/bin/env bash
# Extends a model's context in stages. Each stage starts from the last one's weights, with RoPE scaled to its length:
#   MODEL=meta-llama/Meta-Llama-3-8B DATA=data/books OUTPUT=outputs/extended launch/extend.sh --bf16 --learning_rate 2e-5
# Flags go to every stage. Run it again to continue where it stopped. Variables:
#   STAGES="LENGTH:STEPS ..."  the stages (default: 32K, 128K, 512K)
#   CONTEXT                    the model's original length, before any scaling (8192)
#   REACH                      the length that the model's own scaling covers and stages keep (CONTEXT; 128K for Llama 3.1, 3.2)
#   ROPE                       yarn, linear, dynamic, or theta (the base grows with the length, from THETA, 500000)
#   DATA_512K=DIR              other data for one stage
#   DRY_RUN=1                  print the commands only
#   NPROC PYTHON               as for launch/local.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

refuse() {
    echo "launch/extend.sh: error: $1" >&2
    exit 2
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"
    exit
fi
[[ -n ${MODEL:-} ]] || refuse "MODEL is not set: the Hub id or directory of a model with weights"
[[ -n ${DATA:-} ]] || refuse "DATA is not set: what --data_path takes"
[[ -n ${OUTPUT:-} ]] || refuse "OUTPUT is not set: the directory for the checkpoints of the stages"
stages=${STAGES:-32K:1000 128K:500 512K:200}
rope=${ROPE:-yarn}
theta=${THETA:-500000}
case $rope in
yarn | linear | dynamic | theta) ;;
*) refuse "ROPE '$rope' is unknown; give yarn, linear, dynamic or theta" ;;
esac

# 128K -> 131072
tokens() {
    [[ $1 =~ ^([1-9][0-9]*)([KM]?)$ ]] || refuse "'$1' is not a length; give 32768, 32K or 1M"
    case ${BASH_REMATCH[2]} in
    K) echo $((BASH_REMATCH[1] * 1024)) ;;
    M) echo $((BASH_REMATCH[1] * 1024 * 1024)) ;;
    *) echo "${BASH_REMATCH[1]}" ;;
    esac
}

context=$(tokens "${CONTEXT:-8192}")
reach=$(tokens "${REACH:-$context}")
if [[ -z ${REACH:-} && ${MODEL,,} == *llama-3.[12]* ]]; then
    echo "launch/extend.sh: warning: $MODEL reaches 131072 by its own scaling, which shorter stages would replace; set REACH=128K" >&2
fi
[[ $rope == theta ]] && context=$reach # a larger base leaves the model's own scaling in place

# Prints the RoPE flags for a length; none if the model covers it already.
rope_flags() {
    (($1 <= reach)) && return
    local factor
    factor=$(awk -v length_="$1" -v context="$context" 'BEGIN { printf "%.17g", length_ / context }')
    if [[ $rope == theta ]]; then
        printf '%s\n' --rope_theta "$(awk -v theta="$theta" -v factor="$factor" 'BEGIN { printf "%.0f", theta * factor }')"
    else
        printf '%s\n' --rope_scaling "{\"rope_type\": \"$rope\", \"factor\": $factor}"
    fi
}

model=$MODEL
for stage in $stages; do
    [[ $stage == *:* && ${stage#*:} =~ ^[1-9][0-9]*$ ]] || refuse "'$stage' is not a stage; give LENGTH:STEPS, such as 32K:1000"
    name=${stage%%:*} steps=${stage#*:}
    length=$(tokens "$name")
    output=$OUTPUT/$name
    if [[ -f $output/checkpoint-$steps/trainer_state.json ]]; then
        echo "stage $name: done, $output/checkpoint-$steps" >&2
        model=$output/checkpoint-$steps
        continue
    fi
    data_of_stage=DATA_$name
    mapfile -t more < <(rope_flags "$length")
    more+=(--resume_from_checkpoint auto)  # starts over if nothing was saved
    command=("$root/launch/local.sh" llama3 --model_name_or_path "$model" --data_path "${!data_of_stage:-$DATA}"
        --model_max_length "$length" --max_steps "$steps" --output_dir "$output" "${more[@]}" "$@")
    echo "stage $name: $length tokens, $steps steps, from $model" >&2
    if [[ -n ${DRY_RUN:-} ]]; then
        printf '%q ' "${command[@]}" && echo
    else
        "${command[@]}"
    fi
    model=$output/checkpoint-$steps
done
