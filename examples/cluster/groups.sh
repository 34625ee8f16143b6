#!/bin/bash
# Two groups of two workers each that train alone, and one syncer through which they exchange (LocalUpdates):
# sbatch examples/cluster/groups.sh train.py. Each is a step of the job, on nodes of its own.
#SBATCH --job-name=groups
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --output=groups-%j.txt

num_groups=2 num_workers=2
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
nodes_of() { local IFS=,; echo "${nodes[*]:1 + $1 * num_workers:num_workers}"; }

# The secret that all tasks share, and the addresses of all syncers: host:port,host:port
export REPLICAX_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export REPLICAX_SYNCERS=${nodes[0]}:12345

JAX_PLATFORMS=cpu srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    replicax server --job ps --index 0 --cluster "{\"ps\": [\"$REPLICAX_SYNCERS\"]}" --snapshot-dir saved/syncers &
syncer=$!
for ((group = 0; group < num_groups; group++)); do
    REPLICAX_GROUP=$group/$num_groups REPLICAX_CHECKPOINT_DIR=saved/group-$group \
        srun --label --nodes=$num_workers --ntasks=$num_workers --nodelist="$(nodes_of $group)" --kill-on-bad-exit=0 \
        replicax run "$@" &
    groups+=($!)
done

code=0
for group in "${groups[@]}"; do
    wait "$group" || code=$?  # the others train on
done
kill $syncer  # it saves a last snapshot
wait
exit $code
