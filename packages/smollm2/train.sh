#!/usr/bin/env bash
# Trains SmolLM2's drafters:  packages/smollm2/train.sh TEXT WORK [NAME...]
#
#   TEXT   folder of train-*.jsonl[.gz] and dev-*.jsonl rows (category, prompt, response)
#   WORK   folder for all that is made; the same command again goes on where it stopped
#   NAME   of responses, eagle3, dflash, dart, confu, draft-model, flashhead, ngram; all of them by default
#   ROWS, STEPS, PER_STEP   training prompts, steps of each drafter, responses of a step
#
# On a CPU the target's states are stored with its responses, because running it again is most of a step there.
set -euo pipefail
text=$1 work=$2
shift 2
[ $# -gt 0 ] || set -- responses eagle3 dflash dart confu draft-model flashhead ngram

target=$(crossspec smollm2)
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    rows=${ROWS:-24500} steps=${STEPS:-3000} per_step=${PER_STEP:-32} keep=--no-states type=--bfloat16
else
    rows=${ROWS:-6000} steps=${STEPS:-1500} per_step=${PER_STEP:-8} keep=--states type=--float32
    grep -qs avx512_bf16 /proc/cpuinfo && type=--bfloat16 # products that this processor has
    # tcmalloc keeps the memory of large tensors, which glibc fetches anew in every step (Debian: libtcmalloc-minimal4).
    tcmalloc=$(ldconfig -p 2>/dev/null | grep -o -m 1 '/.*/libtcmalloc_minimal\.so\.4$' || true)
    [ -z "$tcmalloc" ] || export LD_PRELOAD="$tcmalloc${LD_PRELOAD:+:$LD_PRELOAD}"
fi

train() { # NAME [OPTION...]
    local name=$1
    shift
    crossspec train "$name" --data "$work/responses" --target "$target" --out "$work/$name" --steps "$steps" \
        --rows-per-step "$per_step" "$type" "$@"
}

for name in "$@"; do
    case $name in
    responses)
        crossspec train generate --data "$text" --target "$target" --out "$work/responses" --max-prompt-tokens 256 \
            --max-new-tokens 128 --sampled-share 0.3 --temperature 0.8 --max-rows "$rows" --seed 17 "$keep"
        ;;
    eagle3) train eagle3 --draft-vocab 8192 --intermediate-size 1024 --num-steps 5 ;;
    dflash) train dflash --layers 2 --mask-token '<empty_output>' --anchors 16 ;;
    dart) train dart --draft-vocab 4096 --intermediate-size 768 --anchors 24 ;;
    confu) train confu --start "$work/eagle3/model" --seed 1 --replicas 0 ;;
    draft-model)
        train draft-model --layers 2 --intermediate-size 1024 --target-embedding
        python - "$work/draft-model" <<'PYTHON'
# The target's embedding is not shipped twice: what converts the target puts it back.
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

work = Path(sys.argv[1])
out = work / "without-embedding"
out.mkdir(exist_ok=True)
tensors = load_file(work / "model" / "model.safetensors")
del tensors["model.embed_tokens.weight"]
save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
shutil.copy(work / "model" / "config.json", out)
PYTHON
        ;;
    flashhead) crossspec flashhead build "$work/draft-model/model" --out "$work/flashhead-draft-model" --recall 0.99 ;;
    ngram)
        mkdir -p "$work/ngram"
        crossspec ngram build "$work"/responses/train-*.jsonl.gz --tokenizer "$target" --min-count 2 \
            --out "$work/ngram/store.safetensors"
        ;;
    *)
        echo "train.sh: no drafter is called $name; see the head of this file" >&2
        exit 2
        ;;
    esac
done
