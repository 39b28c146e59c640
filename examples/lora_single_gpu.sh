#!/usr/bin/env bash
# Every method on one GPU with 16 to 24 GB, with an adapter on a bfloat16 model (lora) or on a 4-bit model (qlora):
#
#   bash examples/lora_single_gpu.sh deep_grpo lora
#   bash examples/lora_single_gpu.sh tree_grpo qlora --max_steps 100      # further flags go to the example
#   MODEL=Qwen/Qwen2.5-3B-Instruct bash examples/lora_single_gpu.sh sesa qlora
#
# Memory, by arithmetic and not by measurement (examples/benchmarks/lora_memory.py prints it for other settings):
#
#   weights      lora: 2 bytes per weight; qlora: 4.127 bits per weight of the linear maps, 2 bytes for the rest
#   adapter      r (inputs + outputs) weights per linear map; 4 bytes each with lora, 2 with qlora; the same again for
#                the gradient and twice for AdamW
#   activations  4 rows x 1536 tokens x width x 2 bytes per layer (gradient checkpointing), and one layer's insides
#   KV cache     64 rows x 1536 tokens x layers x 2 x KV heads x 128 x 2 bytes: 64 rows are sampled at once
#   logits       never whole: 4096 tokens x 32768 words x 2 bytes in training; 64 x vocabulary x 10 bytes in sampling
#
#   Qwen2.5-1.5B, lora: 5.9 GiB; Qwen2.5-7B, qlora: 10.8 GiB; and about two more for what arithmetic does not see. So
#   the 7B model fits 16 GB as qlora; as lora (20.1 GiB) it is too much for 24 GB.
#
# Out of memory while sampling: lower --gradient_accumulation_steps (fewer rows at once) or --sampling_batch_size (rows
# that a method samples itself). While training: lower --per_device_train_batch_size to 2 (auto, sesa, tree_grpo,
# branpo, tree_rl, attn_rl, evol_rl, gigpo and agent_tree_grpo need rows x accumulation to be a multiple of
# --num_generations), or --max_completion_length.
set -euo pipefail
cd "$(dirname "$0")/.."

METHOD=${1:?usage: bash examples/lora_single_gpu.sh deep_grpo|tree_grpo|... lora|qlora [FLAGS]}
KIND=${2:?usage: bash examples/lora_single_gpu.sh $METHOD lora|qlora [FLAGS]}
shift 2

ADAPTER=(
    --use_peft --lora_r 16 --lora_alpha 32 --lora_target_modules all-linear
    --dtype bfloat16  # the frozen weights; the default, float32, takes twice as much
    --learning_rate 1e-5  # adapters take larger steps than the papers' full training
)
case $KIND in
lora) MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct} ;;
qlora)
    MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
    ADAPTER+=(--load_in_4bit --bnb_4bit_quant_type nf4 --use_bnb_nested_quant)
    ;;
*)
    echo "unknown kind '$KIND'; choose one of lora, qlora." >&2
    exit 2
    ;;
esac
COMMON=(
    --model_name_or_path "$MODEL"
    --output_dir "out/$METHOD-$KIND"
    "${ADAPTER[@]}"
    # 4 rows x 16 = 64 completions per step: 8 prompts with 8 completions each.
    --per_device_train_batch_size 4
    --gradient_accumulation_steps 16
    --num_generations 8
    --max_completion_length 1024
    # Without a KL term no reference is needed; with one it is the base model under the adapter, at no memory.
    --beta 0.0
)

case $METHOD in
auto) python examples/auto.py "${COMMON[@]}" --sampling_batch_size 64 "$@" ;;
deep_grpo) python examples/deep_grpo.py "${COMMON[@]}" --sampling_batch_size 64 "$@" ;;
tree_grpo) python examples/tree_grpo.py "${COMMON[@]}" --sampling_batch_size 64 --overlong_buffer 256 "$@" ;;
sesa) python examples/sesa.py "${COMMON[@]}" --sampling_batch_size 64 "$@" ;;
g2rl) python examples/g2rl.py "${COMMON[@]}" "$@" ;;
# A trajectory's tool answers count as completion tokens. 4 trajectories of each of 16 questions, and their branches.
branpo) python examples/branpo_search_agent.py "${COMMON[@]}" --num_generations 4 --sampling_batch_size 64 "$@" ;;
tree_rl) python examples/tree_rl.py "${COMMON[@]}" --sampling_batch_size 64 "$@" ;;
attn_rl) python examples/attn_rl.py "${COMMON[@]}" --sampling_batch_size 64 "$@" ;;
# Its embedding model, of 0.6B parameters, takes 2.2 GiB more.
evol_rl) python examples/evol_rl.py "${COMMON[@]}" "$@" ;;
gigpo) python examples/gigpo_sokoban_agent.py "${COMMON[@]}" "$@" ;;
agent_tree_grpo)
    # 2 trees of each of 32 questions, and their branches.
    python examples/agent_tree_grpo_search_agent.py "${COMMON[@]}" --num_generations 2 --sampling_batch_size 64 "$@"
    ;;
*)
    echo "unknown method '$METHOD'; choose one of auto, deep_grpo, tree_grpo, sesa, g2rl, branpo, tree_rl, attn_rl, evol_rl, gigpo, agent_tree_grpo." >&2
    exit 2
    ;;
esac
