#!/bin/sh
# run.sh OUT [SAMPLES]: decode every caption of `shapes` by every decoder, SAMPLES images each (default 1), on one thread
# of one core. Repeat it to go on where it stopped, or with more samples to add images to the same runs. No latency is
# measured. The most wanted decoders come first.
set -eu
out=$1
samples=${2:-1}
bin=${SPECBENCH:-specbench}

run() {
    $bin run --model shapes --prompts shapes --samples "$samples" --batch 60 --threads 1 --mode throughput \
        --out "$out" --quiet "$@"
}

run --decoder ar,sjd,scd-mc,sjd-pac,gsd,sjd++,eagle,lantern,best-lossless
run --decoder vertical,eagle-gbv,scd-gs,predictive,eagle-block,sjd-block,lantern++,uniform-rsd,cool-sd,amplify
run --decoder jacobi,sjd-isp,sjd-norefine,sjd-released,zipar,pjd,add
run --decoder gsd:G=10,d=inf --decoder gsd:G=50,d=inf --decoder sjd++:tau=0.1 --decoder amplify:k=8,amplify:k=64,amplify:k=1000
run --decoder lantern++-optimal,cool-sd-linear,gsd-released,lantern-released,lantern++-released,pathexplore
run --decoder zipar-released,zipar-adaptive,pjd-released,pjd-residual
run --decoder vertical-coupled,vvs
run --decoder sjd-pac-released,sjd-sv --decoder sjd-sv:before=tested --decoder cascade,eagle3,adt-tree --decoder cascade:pairs=level
run --decoder ar --top-k 1 --top-p 1 --samples 1  # greedy: all samples would be the same
