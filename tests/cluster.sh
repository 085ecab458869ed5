#!/usr/bin/env bash
# Runs a command on the first host of a Slurm cluster of two hosts, which exists as long as the command runs:
#   tests/cluster.sh sinfo
#
# Hosts are network namespaces of this machine, joined by a cable, with names of their own. They share its disk, its
# cores and one namespace of processes, so nothing outlives the command. Each has a slurmd; node01 has slurmctld, too.
# Nodes declare four GPUs, which are counted only, and more CPUs than there are, because nothing is bound.
# Needs root, and Debian's slurm-wlm and munge, which it installs.
#
# For the command, CLUSTER is the folder of logs and states; `$CLUSTER/slurmd node02` starts a host's slurmd again.
set -euo pipefail

if [[ -z ${CLUSTER:-} ]]; then
    ((EUID == 0)) || { echo "error: $0 makes network namespaces; run it as root" >&2 && exit 2; }
    if ! command -v slurmctld slurmd munged >/dev/null; then
        echo "install: slurm-wlm and munge, by apt-get"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends slurm-wlm munge >/dev/null
    fi
    CLUSTER=$(mktemp -d)
    export CLUSTER
    trap 'rm -rf "$CLUSTER"' EXIT
    status=0
    unshare --mount --net --uts --pid --fork --kill-child --mount-proc "$0" "$@" || status=$?
    exit "$status"
fi

hostname node01
printf '%s\n' "127.0.0.1 localhost" "10.77.0.1 node01" "10.77.0.2 node02" >"$CLUSTER/hosts"
mount --bind "$CLUSTER/hosts" /etc/hosts
unshare --net --uts sleep infinity &
node02=$!
until [[ $(readlink "/proc/$node02/ns/net") != "$(readlink /proc/$$/ns/net)" ]]; do sleep 0.05; done
enter=(nsenter --target "$node02" --net --uts)
ip link add name cable1 type veth peer name cable2
ip link set cable2 netns "$node02"
ip addr add 10.77.0.1/24 dev cable1
ip link set cable1 up
ip link set lo up
"${enter[@]}" bash -c "hostname node02; ip addr add 10.77.0.2/24 dev cable2; ip link set cable2 up; ip link set lo up"

cd "$CLUSTER"
chmod 755 . # munge and Slurm distrust folders that others may write to
mungekey --create --keyfile=munge.key
munged --key-file="$PWD/munge.key" --socket="$PWD/munge.socket" --pid-file="$PWD/munge.pid" --seed-file="$PWD/munge.seed" \
    --log-file="$PWD/munge.log" --force 2>munge.err

export SLURM_CONF=$PWD/slurm.conf
cat >slurm.conf <<CONF
ClusterName=test
SlurmctldHost=node01
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$PWD/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=10
StateSaveLocation=$PWD/state
SlurmdSpoolDir=$PWD/%n.spool
SlurmctldPidFile=$PWD/slurmctld.pid
SlurmdPidFile=$PWD/%n.pid
SlurmctldLogFile=$PWD/slurmctld.log
SlurmdLogFile=$PWD/%n.log
NodeName=node0[1-2] CPUs=8 RealMemory=8192 Gres=gpu:4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
touch gpu{0..3}
echo "NodeName=node0[1-2] Name=gpu File=$PWD/gpu[0-3]" >gres.conf
cat >slurmd <<RUN
#!/usr/bin/env bash
enter=(); [[ \$1 == node01 ]] || enter=(${enter[*]})
exec "\${enter[@]}" slurmd
RUN
chmod +x slurmd
mkdir state
slurmctld
./slurmd node01
./slurmd node02
for ((i = 0; i < 100; i++)); do
    [[ $(sinfo --noheader --states=idle --format=%D 2>/dev/null) == 2 ]] && break
    sleep 0.2
done
((i < 100)) || { tail slurmctld.log node0?.log munge.log >&2 && exit 1; }
cd "$OLDPWD"
status=0
"$@" || status=$?
exit "$status"
