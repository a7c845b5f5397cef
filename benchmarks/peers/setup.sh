#!/bin/sh
# Makes the environments of the packages that the streaming benchmarks compare with:
#
#   benchmarks/peers/setup.sh FOLDER [STREAMING_LLM]
#
# FOLDER/attention_sinks comes from PyPI. FOLDER/streaming_llm needs STREAMING_LLM, a checkout of mit-han-lab/streaming-llm at
# 2e5042606d69933d88fbf909bd77907456b9b4dd, which is on no index. Then: SINKLAB_PEERS=FOLDER python benchmarks/run.py streaming_peers
set -eu
folder=$1
source=${2:-}
torch=$(python -c 'import torch; print(torch.__version__.split("+")[0])')  # differences are then the libraries' own

make() {
    environment=$folder/$1
    shift
    python -m venv "$environment"
    "$environment/bin/pip" install --quiet "torch==$torch" "numpy<2" "$@"
}

make attention_sinks attention_sinks==0.4.0 einops  # it imports einops and does not say so
if [ -n "$source" ]; then
    make streaming_llm transformers==4.33.0
    (cd "$source" && pwd) > "$folder/streaming_llm/source"
else
    echo "streaming_llm is left out: give a checkout of mit-han-lab/streaming-llm as the second argument" >&2
fi
