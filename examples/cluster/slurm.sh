#!/bin/bash
# One worker on each of two nodes: sbatch examples/cluster/slurm.sh, in the folder of this repository. It is what
# replicax launch --on slurm --dry-run prints, with python3 as Python and with the arguments of the script.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=30
#SBATCH --output=digits-%j.txt
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --cpus-per-task=4

trap : TERM  # Slurm signals this shell too. The tasks save, and this shell decides about the restart.

export PYTHONUNBUFFERED=1
# The secret that the tasks share.
[ -n "$REPLICAX_TOKEN$REPLICAX_TOKEN_FILE" ] || export REPLICAX_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
# srun does not take this from the job by itself since Slurm 22.05.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
max_restarts=3
say() { echo "replicax: $*"; }
ask() { squeue --noheader --jobs="$SLURM_JOB_ID" --format="$1"; }
newest() { python3 -m replicax._launch.newest_checkpoint "$REPLICAX_CHECKPOINT_DIR" || echo -1; }  # -1: there is none

# Slurm keeps these with the job, as its comment: the restarts that counted, and those without a requeue.
read -r mark counted here <<<"$(ask %k)"
[ "$mark" = replicax ] || counted=0 here=0
in_vain=0  # runs in a row without progress

while :; do
    export REPLICAX_RESTART_COUNT=$((${SLURM_RESTART_COUNT:-0} + here))
    begun_from=$(newest) began=$SECONDS
    srun --label --kill-on-bad-exit=0 --distribution=block python3 examples/digits.py --strategy auto "$@" &
    step=$!
    while wait $step; code=$?; kill -0 $step 2>/dev/null; do :; done  # a signal ends `wait`, not the step
    ran=$((SECONDS - began))
    [ $code = 0 ] && exit 0
    # A job that was cancelled, or that Slurm itself requeues, is not RUNNING after a moment.
    sleep 2
    case "$(ask %T)" in RUNNING | "") ;; *) exit $code ;; esac

    # Progress is a new checkpoint. 42: the tasks were told to end and have saved, which counts only after a short run.
    is_new=$(($(newest) > begun_from))
    is_short=$((ran < 30 && ! is_new)) is_preempted=$((code == 42))
    most=$((max_restarts == 0 && is_preempted ? 3 : max_restarts))
    in_vain=$((is_new || (is_preempted && ! is_short && ${#REPLICAX_CHECKPOINT_DIR} == 0) ? 0 : in_vain + 1))
    wait_s=$((in_vain == 0 ? 0 : in_vain > 5 ? 30 : 1 << (in_vain - 1)))
    if ((is_preempted && ! is_short)); then
        why="they have saved, so this is not counted"
    elif ((is_new && max_restarts)); then
        why="there is a new checkpoint; this is not counted"
    elif ((counted < most)); then
        counted=$((counted + 1))
        why="restart $counted of $most"
    else
        say "The tasks ended with exit code $code. No restarts are left."
        exit $code
    fi
    # 143: SIGTERM came before Python listened. These nodes are to be left, so the job goes back to the queue.
    if [ $code = 42 ] || [ $code = 143 ]; then
        say "The tasks ended with exit code $code. Requeueing the job: $why."
        scontrol update JobId="$SLURM_JOB_ID" Comment="replicax $counted $here"
        scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this shell
        exit $code
    fi
    say "The tasks ended with exit code $code. Starting them again: $why."
    sleep $wait_s
    here=$((here + 1))
    scontrol update JobId="$SLURM_JOB_ID" Comment="replicax $counted $here"
done
