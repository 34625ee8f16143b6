cat > train.py <<'END'
import replicax as rx

strategy = rx.ParameterServerStrategy(rx.cluster_resolver.TFConfigClusterResolver())
coordinator = rx.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = rx.Variable(0.0)


def step():
    total.assign_add(1.0)
    return total.value * 2.0


loss = coordinator.schedule(step)
print("loss", float(loss))
END
replicax launch --workers 1 --ps 1 train.py
