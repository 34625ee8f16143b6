cat > train.py <<'END'
print('training')
END
replicax launch --worker 2 train.py
