#!/usr/bin/env bash
# A real SLURM on this machine: one controller and several nodes, to try the scripts beside this one.
#
#     sudo apt-get install slurm-wlm munge
#     scripts/slurm/local_cluster.sh start out/cluster 2    # two nodes; says how to use them
#     scripts/slurm/local_cluster.sh stop out/cluster
#
# Everything it writes is in the folder, and it shares nothing with a SLURM or munge that runs
# already. Whoever starts it is its administrator and its only user; root works too.
set -euo pipefail

CPUS_PER_NODE=2 # pretended: two nodes of two work on any machine
WAIT_S=30

main() {
    [[ $# -ge 2 ]] || die "usage: local_cluster.sh start|stop FOLDER [NODES]"
    local command=$1 folder=$2
    case $command in
        start) mkdir -p "$folder" && start "$(realpath "$folder")" "${3:-2}" ;;
        stop) stop "$(realpath "$folder")" ;;
        *) die "$command is neither start nor stop" ;;
    esac
}

die() {
    echo "local_cluster.sh: error: $*" >&2
    exit 1
}

start() {
    local folder=$1 num_nodes=$2 program
    for program in munged slurmctld slurmd; do
        PATH=$PATH:/usr/sbin command -v "$program" >/dev/null ||
            die "no $program; run: sudo apt-get install slurm-wlm munge"
    done
    [[ $num_nodes =~ ^[1-9][0-9]?$ ]] || die "$num_nodes nodes: give 1 to 99"
    [[ ! -e $folder/slurm.conf ]] || die "$folder holds a cluster; stop it first"
    export PATH=$PATH:/usr/sbin SLURM_CONF=$folder/slurm.conf
    # shellcheck disable=SC2064  # the folder of now
    trap "stop '$folder'" EXIT # whatever fails from here on leaves no daemon behind

    mkdir -p "$folder/state"
    configure "$folder" "$num_nodes" >"$SLURM_CONF"
    (umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
    munged --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" \
        --pid-file="$folder/munge.pid" --seed-file="$folder/munge.seed" \
        --log-file="$folder/munge.log" 2>"$folder/munge.err" # it warns of each folder's owner
    slurmctld
    local node
    for ((node = 1; node <= num_nodes; node++)); do
        slurmd -N "node$node"
    done
    wait_for_nodes "$num_nodes"
    trap - EXIT
    echo "$num_nodes nodes of $CPUS_PER_NODE CPUs are up. In a shell: export SLURM_CONF=$SLURM_CONF"
}

# Write the configuration that all commands find through SLURM_CONF.
configure() {
    local folder=$1 num_nodes=$2 ports
    read -ra ports < <(free_ports $((num_nodes + 1)))
    cat <<END
ClusterName=local
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
# A job that is requeued starts again when its old credential has expired: soon, here.
AuthInfo=socket=$folder/munge.socket,cred_expire=5
# No cgroups, so that it runs in a container too.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
# Between the signal that asks ranks to save and the one that ends them: for a slow machine.
KillWait=120
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdSpoolDir=$folder/%n
SlurmdPidFile=$folder/%n.pid
SlurmdLogFile=$folder/%n.log
PartitionName=local Nodes=ALL Default=YES State=UP
END
    local node
    for ((node = 1; node <= num_nodes; node++)); do
        echo "NodeName=node$node NodeAddr=127.0.0.1 Port=${ports[node]} CPUs=$CPUS_PER_NODE"
    done
}

free_ports() {
    python3 - "$1" <<'END'
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))
END
}

wait_for_nodes() {
    local until=$((SECONDS + WAIT_S))
    while [[ $(sinfo --noheader --Node --states=idle 2>/dev/null | wc -l) -lt $1 ]]; do
        ((SECONDS < until)) || die "the nodes are not up after $WAIT_S s; see ${SLURM_CONF%/*}/*.log"
        sleep 0.2
    done
}

stop() {
    local folder=$1 pid_file pid
    [[ -e $folder/slurm.conf ]] || die "$folder holds no cluster"
    trap - EXIT
    SLURM_CONF=$folder/slurm.conf scancel --quiet --full --signal=KILL --user="$(id -un)" \
        2>/dev/null || true # a controller that never started has no jobs
    for pid_file in "$folder"/node*.pid "$folder/slurmctld.pid" "$folder/munge.pid"; do
        [[ -s $pid_file ]] || continue
        pid=$(<"$pid_file")
        kill "$pid" 2>/dev/null || continue
        while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    done
    rm -f "$folder/slurm.conf"
}

main "$@"
