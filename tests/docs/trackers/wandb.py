"""Replaces W&B, which needs the network: prints its calls."""


class Run:
    def log(self, values, step=None):
        log(values, step)

    def finish(self):
        print("wandb: finish")


def init(project=None, config=None, **more):
    print("wandb: init", project, config or more)
    return Run()


def log(values, step=None):
    print("wandb:", sorted(values), "at step", step)
