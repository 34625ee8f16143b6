cat > train.py <<'END'
print('training')
END
replicax launch --workers 2 trian.py
