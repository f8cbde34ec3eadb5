"""extras/interop/foreign_launch.py: accelerate, etcd and Kubernetes' variables as torchrun and a shell take them."""

from __future__ import annotations

import shlex

import pytest

from extras.migrate import translate

TRAINER = " --learning_rate=5e-05 --lr_scheduler_type=linear --warmup_steps=0 --adam_beta2=0.999 --weight_decay=0.0"
NODE, OTHER_NODE = "--machine_rank=$(POD_RANK)", "--node_rank=$(POD_RANK)"
ETCD = "--rdzv_backend=etcd --main_process_ip=etcd --main_process_port=2379"


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        (
            "accelerate launch --num_processes 16 --num_machines=2 --mixed_precision bf16 train.py",
            f"torchrun --nnodes=2 --nproc_per_node=8 train_ddp.py --bf16{TRAINER}",
        ),
        (
            "srun -l accelerate launch --rdzv_backend=c10d --main_process_ip=head --main_process_port=2379 --use_fsdp "
            "--machine_rank=1 x/train.py --bf16",
            "srun -l torchrun --nnodes=1 --rdzv_backend=c10d --rdzv_endpoint=head:2379 "
            f"train_fsdp2.py --bf16{TRAINER}",
        ),
        (
            f"accelerate launch --num_processes=2 --num_machines=2 {NODE} {ETCD} train.py",
            'torchrun --nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d "--rdzv_endpoint=${MASTER_ADDR}:2379" '
            f"train_ddp.py{TRAINER}",
        ),
        (
            f"torchrun --nproc_per_node 2 {OTHER_NODE} --rdzv_backend etcd-v2 --rdzv_endpoint etcd:2379 train_ddp.py",
            "torchrun --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:2379 train_ddp.py",
        ),
        (
            f"accelerate launch --num_processes=2 --num_machines=2 {NODE} --main_process_ip=head train.py",
            'torchrun --nnodes=2 --nproc_per_node=1 "--node_rank=${POD_RANK}" --master_addr=head train_ddp.py'
            + TRAINER,
        ),
    ],
)
def test_launchers_become_torchruns(launch, line):
    assert str(translate(shlex.split(launch))).splitlines()[0] == line
