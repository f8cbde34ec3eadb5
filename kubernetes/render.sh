#!/usr/bin/env bash
# Print the manifest of a template: variables filled in, none of them missing, switches set.
#
#   kubernetes/render.sh train-ddp-template.yaml | kubectl apply -f -
#   kubernetes/render.sh --with kueue,hyperpod train-fsdp-template.yaml > train-fsdp.yaml
#
# Templates need nothing but the guide's variables, for plain envsubst. This script also sets those that
# kubernetes/env_vars.sh adds: of a line that ends with `# [NAME]` it replaces the value, if NAME is set; where there is no
# value, NAME is needed. Switches (docs/kubernetes.md) are the lines `# [NAME] ...`, which are uncommented, and
# `...  # [not NAME]`, which are dropped; a line `# [not NAME]` alone is dropped with the document below it. `guide` and
# `hyperpodjob` have no lines. Flags are words with blanks between them: the pods read them as they are, without a shell, so
# that quotes are part of a word. Any envsubst will do, gettext's or the one written in Go.
set -euo pipefail
export LC_ALL=C # [a-z] is ASCII, and a character a byte

fail() { echo "error: $*" >&2; exit 2; }
# printable TEXT: for a line on a terminal
printable() { local text=${1:0:80}; echo "${text//[^[:print:]]/?}"; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: kubernetes/render.sh [--with SWITCH,...] TEMPLATE"
switches=() operator=kubeflow
if [ "${1:-}" = --with ]; then
  [ $# -ge 2 ] || fail "--with needs the names of switches; $usage"
  IFS=, read -ra switches <<<"$2"
  shift 2
fi
case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
[ $# -eq 1 ] || fail "$usage"
template=$1
[ -f "$template" ] || template=$here/$1
[ -f "$template" ] || fail "$1: no such template; there are $(cd "$here" && echo *.yaml)"
command -v envsubst >/dev/null || fail "envsubst is missing: apt-get install gettext-base"

text=$(grep -vF 'source-env-vars.sh-before-envsubst' "$template") # this script names the variables itself
for switch in "${switches[@]}"; do
  if [ "$switch" = guide ] && grep -qF "\"\${GUIDE}\"" <<<"$text"; then
    GUIDE=1
    continue
  fi
  if [ "$switch" = hyperpodjob ] && grep -q '^kind: PyTorchJob$' <<<"$text"; then
    case " ${switches[*]} " in *" elastic "* | *" uid "*) fail "--with hyperpodjob excludes elastic and uid" ;; esac
    operator=hyperpod
    continue
  fi
  if ! [[ $switch =~ ^[a-z0-9]+$ ]] || ! grep -qE "^ *# \[(not )?$switch\]( |$)" <<<"$text"; then
    fail "$1 has no switch '$(printable "$switch")'"
  fi
  text=$(sed -E "s/^( *)# \[$switch\] /\1/; /^# \[not $switch\]$/,/^---$/d; /# \[not $switch\]$/d" <<<"$text")
done
# [NAMESPACE] namespace: ... is a switch that the variable turns on.
[ -z "${NAMESPACE:-}" ] || text=$(sed -E 's/^( *)# \[NAMESPACE\] /\1/' <<<"$text")
text=$(sed -E '/^ *# \[[A-Za-z0-9]+\] /d; /^# \[not [a-z0-9]+\]$/d; s/ +# \[not [a-z0-9]+\]$//' <<<"$text")

# A PyTorchJob as HyperPod's own operator has it: `hyperpod-launch` (Dockerfile.hyperpod) waits in each pod for the operator,
# which names the ranks. Its namespace may reach the agents, which answer to all who do.
if [ "$operator" = hyperpod ]; then
  run_id=$(sed -nE 's/^    rdzvId: //p' <<<"$text")
  text=$(sed -E '
    s|^apiVersion: kubeflow.org/v1$|apiVersion: sagemaker.amazonaws.com/v1|
    s|^kind: PyTorchJob$|kind: HyperPodPyTorchJob|
    /^  # torchrun reads PET_/d
    /^  elasticPolicy:$/,/^    maxRestarts:/d
    s|^    cleanPodPolicy: Running.*|    cleanPodPolicy: All|
    s|^    backoffLimit:|    jobMaxRetryCount:|
    /^    ttlSecondsAfterFinished:/r '"$here"'/hyperpod-rules.txt
    s|^  pytorchReplicaSpecs:$|  replicaSpecs:|
    s|^    Worker:$|    - name: pods|
    /^      # 2 is final/,/^      restartPolicy: ExitCode$/d
    s|training.kubeflow.org/job-name|app.kubernetes.io/instance|
    s|name: pytorchjob-port$|name: agent|
    s|containerPort: 23456|containerPort: 8080|
    s|exec python3 -m extras.launch |exec hyperpod-launch |
  ' <<<"$text")
  label=$(sed -nE 's/^ +(app.kubernetes.io.instance: .*)/\1/p' <<<"$text" | tail -n 1)
  text=${text/$'\n        metadata:\n'/$'\n        metadata:\n          labels:\n            '$label$'\n'}
  # shellcheck disable=SC2016 # envsubst's variables
  env='- name: PET_NNODES|  value: "${NUM_NODES}"|- name: PET_NPROC_PER_NODE|  value: "${GPU_PER_NODE}"|- name: PET_RDZV_ID|  value: '
  text=${text/$'\n              env:\n'/$'\n              env:\n                '${env//|/$'\n                '}$run_id$'\n'}
  if grep -q '^kind: NetworkPolicy$' <<<"$text"; then
    reach='    - from: # the operator|        - namespaceSelector:|            matchLabels:'
    reach+='|              kubernetes.io/metadata.name: aws-hyperpod|      ports:|        - port: 8080|---'
    text=$(sed "/^kind: NetworkPolicy$/,/^---$/s~^---$~${reach//|/\\n}~" <<<"$text")
  fi
fi

# Defaults that depend on other variables; all others are the template's.
export RUN_ID=${RUN_ID:-$(date -u +%Y%m%d-%H%M%S)}
export JOB_NAME=${JOB_NAME:-$(sed -nE 's/^  name: (\S+) # \[JOB_NAME\]$/\1/p' <<<"$text")}
if [ "${EFA_PER_NODE:-}" = 0 ]; then huge=0; else huge=5120Mi; fi # EFA's huge pages are not there where EFA isn't
export HUGEPAGES=${HUGEPAGES:-$huge} CP_SIZE=${CP_SIZE:-2} GUIDE=${GUIDE:-0}
more="" # variables that become flags
if [ -n "${INIT_FROM:-}" ] && grep -q '\[TRAIN_FLAGS\]' <<<"$text"; then
  TRAIN_FLAGS="--model_name_or_path=$INIT_FROM ${TRAIN_FLAGS:-}" more=INIT_FROM
fi
case " ${switches[*]} " in *" metrics "*)
  TRAIN_FLAGS="--metrics_port=9464 --metrics_host=0.0.0.0 --run_name=$JOB_NAME ${TRAIN_FLAGS:-}"
esac

# `name: esm2 # [JOB_NAME]` becomes `name: "${JOB_NAME}"`, or `name: esm2` if JOB_NAME is not set.
for name in $(grep -oE '\[[A-Z_]+\]' <<<"$text" | tr -d '[]' | sort -u); do
  [ -n "${!name:-}" ] || text=$(sed -E "s/(: [^ ].*) # [^ ]*\[$name\][^ ]*$/\1/" <<<"$text")
done
text=$(sed -E '/^ *[a-z].* # [^ ]*\[[A-Z_]+\][^ ]*$/{
  s/^( *)value: .* # \[([A-Z]+_FLAGS)\]$/\1value: |1-\n\1  [\2]/
  s/: (.* )?# ([^ ]*)$/: "\2"/
  s/"(\[MIN_NODES\])"$/\1/
  s/^( *(completions|parallelism): )"(\[SHARDS\])"$/\1\3/
  s/\[([A-Z_]+)\]/${\1}/g
}' <<<"$text")
text=${text// --cp_size=2 / --cp_size=\$\{CP_SIZE\} }

names=$(grep -vE '^ *#' <<<"$text" | grep -oE '\$\{[A-Z_0-9]+\}' | grep -oE '[A-Z_0-9]+' | sort -u || true) # none: fine
missing=()
for name in $names; do
  [ -n "${!name:-}" ] || [[ $name = *_FLAGS ]] || missing+=("$name")
done
[ "${#missing[@]}" -eq 0 ] || fail "unset or empty: ${missing[*]}; see kubernetes/env_vars.sh"
# What is pasted is the very string that was given, wherever it stands: in quotes in YAML and as a word of a pod's command,
# so that it is one plain word; or a number, which YAML reads as the same number. Flags are not pasted but lines of a block
# and an environment variable, in which the kubelet would take $(NAME) for a variable, but for $$(NAME).
must_be() { [[ -z ${!1:-} || ${!1} =~ ^($2)$ ]] || fail "$1=$(printable "${!1}"): $3"; }
for name in $more $names; do
  case $name in
    *_FLAGS)
      value=${!name:-}
      value=${value//[$'\n\r\t']/ }
      # Control characters beyond ASCII, and what YAML takes for ends of lines or for a byte order mark.
      for one in [[:cntrl:]] $'\xc2'[$'\x80'-$'\x9f'] $'\xe2\x80'[$'\xa8\xa9'] $'\xef\xbb\xbf'; do
        # shellcheck disable=SC2053 # a pattern
        [[ $value != *$one* ]] || fail "$name has a control character in it"
      done
      export "$name=${value//\$/\$\$}"
      ;;
    GUIDE) must_be "$name" '[01]' "1 for the guide's run, else 0" ;;
    NUM_NODES | MIN_NODES) must_be "$name" '[1-9][0-9]{0,5}' "not a number of nodes, at least 1, in plain digits" ;;
    SHARDS) must_be "$name" '[1-9][0-9]{0,3}' "not a number of shards, at least 1, in plain digits" ;;
    CP_SIZE) must_be "$name" '[1-9][0-9]{0,5}' "not a number of ranks, at least 1, in plain digits" ;;
    GPU_PER_NODE | EFA_PER_NODE) must_be "$name" '0|[1-9][0-9]{0,5}' "not a number of devices, in plain digits" ;;
    MEMORY | HUGEPAGES) must_be "$name" '(0|[1-9][0-9]{0,14})([KMGTP]i|[kMGTP])?' "not an amount of memory, as 16Gi" ;;
    JOB_NAME) # the operator names Services for it
      must_be "$name" '[a-z]([-a-z0-9]{0,40}[a-z0-9])?' "small letters, digits and - between them, at most 42, first a letter"
      ;;
    NAMESPACE)
      must_be "$name" '[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?' "small letters, digits and - between them, at most 42"
      ;;
    *) must_be "$name" '[A-Za-z0-9_./:@%+=,-]+' "only letters, digits and _./:@%+=,- can be in it" ;;
  esac
  case $name in TARGET_PATH | OUTPUT_DIR | MODEL | INIT_FROM)
    ! [[ ${!name:-}/ =~ //.|/\.{1,2}/|^\.{1,2}/ ]] || fail "$name=${!name}: no part of a path can be empty, . or .."
    ;;
  esac
  case $name:${!name:-}/ in
    TARGET_PATH:/fsx-shared/* | OUTPUT_DIR:/fsx-shared/*) ;;
    TARGET_PATH:* | OUTPUT_DIR:*) fail "$name=${!name} is not on the volume, which is mounted at /fsx-shared" ;;
  esac
done
if grep -qx MIN_NODES <<<"$names"; then
  [ "$MIN_NODES" -le "$NUM_NODES" ] || fail "MIN_NODES=$MIN_NODES is above NUM_NODES=$NUM_NODES"
fi
if grep -qx CP_SIZE <<<"$names"; then
  each=$((GPU_PER_NODE > 0 ? GPU_PER_NODE : 1)) # without GPUs: one rank a pod
  ranks=$((NUM_NODES * each))
  [ $((ranks % CP_SIZE)) -eq 0 ] ||
    fail "CP_SIZE=$CP_SIZE does not divide the job's $ranks ranks (nodes: $NUM_NODES, ranks a node: $each)"
  # Only a warning: results are the same, and with one GPU per node or packs too long for a node it is the only way.
  [ $((each % CP_SIZE)) -eq 0 ] ||
    echo "warning: CP_SIZE=$CP_SIZE on $each ranks a node: keys cross the network in every layer" >&2
fi
image=${IMAGE_URI:-${REGISTRY:-}${DOCKER_IMAGE_NAME:-}:${TAG:-}}
[[ ${MODEL:-} != /* ]] || [ -n "${INIT_FROM:-}" ] || ! grep -qx MODEL <<<"$names" ||
  echo "warning: MODEL=$MODEL: only its configuration is read; INIT_FROM=$MODEL starts from its weights" >&2
case $image in [./:]*) fail "$image is no image: REGISTRY has no host" ;; esac
manifest=$(envsubst <<<"$text")
# Read as kubectl will read it, where there is a PyYAML (install.sh brings one).
python=$here/../.venv/bin/python
if [ -x "$python" ] || python=$(command -v python3); then
  problem=$("$python" -c '
import sys

try:
    import yaml
except ImportError:
    sys.exit()
try:
    list(yaml.load_all(sys.argv[1], getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
except yaml.YAMLError as error:
    sys.exit(" ".join(str(error).split()))
' "$manifest" 2>&1) || fail "$1 with these variables is not YAML: $problem"
fi
printf '%s\n' "$manifest"
