#!/usr/bin/env bash
# Run a command in the image, in the current folder; see --help.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: docker/launch.sh [--cpu] ["COMMAND"]

Run COMMAND, one string, in a new container of ort-training-getting-started:latest with
all GPUs, the current folder at /workspace, and your user and group. Without a COMMAND it
is an interactive shell. Build the image first, with docker/build.sh.

  --cpu       use ort-training-getting-started:cpu, without GPUs
  -h, --help  show this

Example: cd samples/getting_started && ../../docker/launch.sh "python train_ort.py --device cuda"
TEXT
}

fail() {
    echo "error: $1" >&2
    exit "${2:-2}"
}

cpu=false
while (($#)); do
    case "$1" in
    -h | --help)
        usage
        exit
        ;;
    --cpu) cpu=true ;;
    --)
        shift
        break
        ;;
    -*) fail "unknown option '$1'; docker/launch.sh --help shows the options" ;;
    *) break ;;
    esac
    shift
done
if (($# > 1)); then
    fail "the command is one string: docker/launch.sh \"$*\""
fi

options=(
    --rm
    --pull=never # the name is ours alone: whatever a registry has under it is not
    --shm-size=1g
    --ulimit memlock=-1
    --ulimit stack=67108864
    --mount "type=bind,source=$PWD,target=/workspace"
    --workdir /workspace
    --user "$(id -u):$(id -g)"
    --env HOME=/home/trainer
)
if [[ -t 0 && -t 1 ]]; then
    options+=(--interactive --tty)
elif (($# == 0)); then
    fail "a shell needs a terminal: give a command, or run this from a terminal"
fi
if $cpu; then
    image=ort-training-getting-started:cpu
else
    image=ort-training-getting-started:latest
    options+=(--gpus all)
fi

if ! command -v docker >/dev/null; then
    fail "there is no docker on PATH: install Docker Engine 23 or newer" 127
fi
if (($# == 0)); then
    exec docker run "${options[@]}" "$image" bash
fi
exec docker run "${options[@]}" "$image" bash -c "$1"
