#!/usr/bin/env bash
# Measures SmolLM2's methods beside vLLM's own:  packages/smollm2/results.sh OUT [PROMPTS]
#
#   OUT       folder: a table (.md) and all figures (.json) of each part
#   PROMPTS   JSON lines with prompt and category; by default the package's 24
#   METHODS   of `crossspec smollm2 METHOD`, with commas
#   NATIVE    vLLM's own methods beside them, of eagle3, dflash, draft_model, ngram; all where their drafter is there
#   PARTS     of batch-1, batch-4, t0.7, t1, 1k, 4k (contexts of so many tokens); all of them by default
#   REPEATS, TOKENS   turns of every method (1), and tokens of an answer (64)
#
# All engines are up at a time, so that methods take turns at every prompt: 1.5 to 2 GiB each.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
out=$1 prompts=${2:-$here/vllm_crossspec_smollm2/prompts.jsonl}
methods=${METHODS:-eagle3,eagle3-tree,dart,suffix,whiflash-goodput}
repeats=${REPEATS:-1} tokens=${TOKENS:-64} natives=,${NATIVE:-eagle3,dflash,draft_model,ngram},
target=$(crossspec smollm2)
mkdir -p "$out/specs"

specs=()
spec() { # NAME CONFIG
    echo "$2" >"$out/specs/$1.json"
    specs+=(--spec "$out/specs/$1.json")
}
for method in ${methods//,/ }; do
    config=$(crossspec smollm2 "$method") # of its own line, so that a missing drafter ends this
    spec "$method" "$config"
done
native() { # METHOD LENGTH FOLDER: the same drafter as vLLM's own chain
    [[ $natives != *,$1,* || ! -f $3/config.json ]] ||
        spec "vllm-$1" "{\"method\": \"$1\", \"model\": \"$3\", \"num_speculative_tokens\": $2}"
}
native eagle3 4 "$here/vllm_crossspec_smollm2/eagle3"
native dflash 7 "$here/vllm_crossspec_smollm2/dflash"
native draft_model 4 "$target/draft-model"
[[ $natives != *,ngram,* ]] || spec vllm-ngram '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'

bench() { # PART [OPTION...]
    local part=$1
    shift
    crossspec bench --model "$target" "${specs[@]}" --dtype float32 --max-tokens "$tokens" --repeats "$repeats" --keep-engines \
        --json "$out/$part.json" --markdown "$out/$part.md" "$@"
}
long() { # TOKENS: questions about this project's documents, in prompts of about so many tokens
    python - "$here/../../docs" "$target" "$1" <<'PYTHON' >"$out/prompts-$1.jsonl"
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

docs, target, length = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
text = "\n\n".join(file.read_text() for file in sorted(docs.rglob("*.md")))
tokenizer = AutoTokenizer.from_pretrained(target)
ids = tokenizer(text)["input_ids"]
for number, question in enumerate(["Summarize this text.", "List its main points.", "What is it about?"]):
    part = tokenizer.decode(ids[number * length : (number + 1) * length])
    print(json.dumps({"category": f"{length} tokens", "prompt": f"{part}\n\n{question}"}))
PYTHON
}

for part in ${PARTS:-batch-1 batch-4 t0.7 t1 1k 4k}; do
    case $part in
    batch-*) bench "$part" --prompts "$prompts" --batch-sizes "${part#batch-}" ;;
    t*) bench "$part" --prompts "$prompts" --batch-sizes 1 --temperature "${part#t}" ;;
    *k)
        long "${part%k}000"
        bench "$part" --prompts "$out/prompts-${part%k}000.jsonl" --batch-sizes 1
        ;;
    *)
        echo "results.sh: no part is called $part; see the head of this file" >&2
        exit 2
        ;;
    esac
done
