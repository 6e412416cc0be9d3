#!/usr/bin/env bash
# Whole models on one GPU of 139 GiB: every table of `redknot bench`, each in a process of its own.
#
#   benchmarks/whole_models.sh RESULTS [STEP...]     all steps, about 25 minutes on an H200
#
# RESULTS gets a JSON, a CSV and a log for each step. FIDELITY names reports of `redknot eval --json`
# (default: those in benchmarks/results), PYTHON the interpreter.
set -u
results=${1:?a folder for the results}
shift
here=$(dirname "$0")
fidelity=${FIDELITY:-$here/results/fidelity_12.json $here/results/fidelity_50.json $here/results/fidelity_judge_12.json}
drop=question_drop:windows=context:first=0.4:then=0.2
settings=$drop@0.125,$drop@0.5,redknot:mass=0@0.125
mkdir -p "$results"

bench() { # NAME COMMAND MODEL OPTIONS...
    local name=$1 command=$2 model=$3
    shift 3
    echo "$name"
    # shellcheck disable=SC2086
    "${PYTHON:-python3}" -m redknot bench "$command" "$model" --load-format dummy --device cuda \
        --fidelity $fidelity --json "$results/$name.json" --csv "$results/$name.csv" "$@" \
        >"$results/$name.log" 2>&1 || echo "$name failed: $(tail -n 1 "$results/$name.log")"
}

step() {
    case $1 in
    ttft) bench ttft_qwen3_32b ttft qwen3-32b --tokens 8192,16384,32768,65536 --settings $settings --repeats 2 --peer-max-tokens 32768 ;;
    long) # K/V and segments of 128K tokens leave little room beside the weights
        PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
            bench ttft_qwen3_32b_128k ttft qwen3-32b --tokens 131072 --settings $settings --repeats 1 --peers none ;;
    small) bench ttft_qwen3_32b_512 ttft qwen3-32b --tokens 32768 --segment-tokens 512 --settings $drop@0.125 --repeats 2 --peers none ;;
    host) bench ttft_qwen3_32b_host ttft qwen3-32b --tokens 32768 --settings $drop@0.125 --repeats 2 --peers none --host-segments ;;
    peers) bench ttft_qwen3_32b_peers ttft qwen3-32b --tokens 32768 --settings $drop@0.125 --repeats 2 --peers fa3,fa4,cudnn ;;
    cold) bench ttft_qwen3_32b_cold ttft qwen3-32b --tokens 256,1024,8192 --segment-tokens 512 --settings $drop@0.125 --repeats 5 --peers none --cold ;;
    short) bench ttft_qwen3_32b_short ttft qwen3-32b --tokens 256,1024 --segment-tokens 128 --settings $drop@0.125 --repeats 7 --peers none --planned ;;
    mistral) bench ttft_mistral_7b ttft mistral-7b-v0.3 --tokens 8192,32768 --settings $drop@0.125 --repeats 7 ;;
    llama) bench ttft_llama_70b ttft llama-3.3-70b --layers 40 --tokens 32768 --settings $drop@0.125 --repeats 1 --peers none ;;
    breakdown) bench breakdown_qwen3_32b breakdown qwen3-32b --tokens 32768 --settings $settings ;;
    decode) bench decode_qwen3_32b decode qwen3-32b --tokens 32768 --shares 0.125,0.5 --batches 1,8 ;;
    capacity) bench capacity_qwen3_32b capacity qwen3-32b --tokens 32768 --shares 0.125,0.3,0.5 --prefill-policy reuse:windows=all ;;
    traffic) bench traffic_mistral_7b traffic mistral-7b-v0.3 --tokens 8192 --clients 8,32 --requests 64 --settings prefix,$drop@0.125 ;;
    *) echo "unknown step $1" && return 2 ;;
    esac
}

for one in "${@:-ttft long small host peers cold short mistral llama breakdown decode capacity traffic}"; do
    for name in $one; do step "$name" || exit 2; done
done
