#!/usr/bin/env bash
# Build the image. Runs from any folder; see --help.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: docker/build.sh [--cpu] [OPTION OF docker build ...]

Build the image ort-training-getting-started:latest: orttrainer for CUDA 13 GPUs.

  --cpu       build ort-training-getting-started:cpu instead, without CUDA
  -h, --help  show this

Anything else goes to docker build, such as --no-cache.
TEXT
}

runtime=gpu
tag=latest
case "${1:-}" in
-h | --help)
    usage
    exit
    ;;
--cpu)
    runtime=cpu
    tag=cpu
    shift
    ;;
esac

if ! command -v docker >/dev/null; then
    echo "error: there is no docker on PATH: install Docker Engine 23 or newer" >&2
    exit 127
fi

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export DOCKER_BUILDKIT=1
exec docker build --file "$root/docker/Dockerfile" --build-arg "RUNTIME=$runtime" \
    --tag "ort-training-getting-started:$tag" "$@" "$root"
