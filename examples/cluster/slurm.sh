#!/bin/bash
# One worker on each of two nodes: sbatch examples/cluster/slurm.sh, in the folder of this repository.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --output=digits-%j.txt

MAX_RESTARTS=${MAX_RESTARTS:-3}

for ((restart = 0; restart <= MAX_RESTARTS; restart++)); do
    export REPLICAX_RESTART_COUNT=$restart
    # Nothing else has to be said: replicax reads the step's variables, of which srun sets a set for each task.
    srun --label --distribution=block python3 examples/digits.py --strategy auto "$@" && exit 0
    code=$?
    echo "the step ended with exit code $code"
done
exit "$code"
