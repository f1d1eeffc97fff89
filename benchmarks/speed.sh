# Time the rows of benchmarks/gpu.py, and those of version 0.2.0 in turn: bash benchmarks/speed.sh OLD
# OLD holds src and benchmarks of version 0.2.0. Nothing may run beside it. Four and a half minutes on an H200, 90 s of it compiling.
# "ours" of the rows of silo and dcco is compared. Their merged cohort has resnet18 with group norm, because resnet14 is another
# network since 0.3.
OLD=${1:?OLD: a folder with src and benchmarks of version 0.2.0}
export OMP_NUM_THREADS=4 PYTHONWARNINGS=ignore
new="env PYTHONPATH=$PWD/src" old="env PYTHONPATH=$OLD/src"
logs=$(mktemp -d)
for folder in benchmarks "$OLD/benchmarks"; do
  sed 's/resnet14/resnet18/; s/, lambda: dcco(512, 1)//' "$folder/gpu.py" > "$folder/gpu_resnet18.py"
done
pids=
for row in ccl featarc ditto simclr; do
  $new timeout 240 python3 benchmarks/gpu.py --rows $row --samples 2560 --warm > "$logs/$row" 2>&1 & pids="$pids $!"
done
$old timeout 240 python3 "$OLD/benchmarks/gpu_resnet18.py" --warm > "$logs/old" 2>&1 & pids="$pids $!"
$new timeout 240 python3 benchmarks/gpu_resnet18.py --warm > "$logs/new" 2>&1 & pids="$pids $!"
wait $pids
echo "compiled in $SECONDS s"; tail -qn 1 "$logs"/*
for program in old new new old; do
  folder=benchmarks; [ $program = old ] && folder=$OLD/benchmarks
  echo "== $program"; ${!program} timeout 70 python3 "$folder/gpu_resnet18.py" --repeats 4 --samples 4992
done
for row in simclr ccl featarc ditto; do
  echo "== $row"; $new timeout 90 python3 benchmarks/gpu.py --rows $row --samples 2560 --repeats 3
done
rm benchmarks/gpu_resnet18.py "$OLD/benchmarks/gpu_resnet18.py"
echo "in all $SECONDS s"
