"""User errors: exit code 2, one line with the values and the fix, nothing left on disk.

The messages of the rows are examples: tests compare their values (flags, numbers, names, paths), and the
wording of only the five rows in EXACT.

One row for each kind of mistake; test_cli.py has those of single flags, and test_data.py those of a file's
content. They run in this process, by the code of the command; a few also run as real commands, and print
how much processor time the answer took (no test asserts a time).
"""

import json
import os
import pathlib
import re
import resource
import shutil

import pytest

from recipes.common.checkpoint import integrity
from recipes.common.runtime import processes
from tests.conftest import ROOT, full_except
from tests.support.quick import quick as quick
from tests.support.runs import TINY

pytestmark = pytest.mark.promise("user-errors")

# {here} is a folder with the files below; rows are flags after FLAGS, and a message or a part of one.
FLAGS = ("--size=tiny", "--seq_len=32", "--batch_size=16", "--sample_bytes=0", "--steps=3")

FLAG_ROWS = [
    (["--step=7"], "--step is not a flag; did you mean --steps?"),
    (["--size=huge"], '--size=huge is not one of tiny, small, medium, 124m, 1b, 8b, 70b'),
    (["--num_layers=3"], "--num_layers is not a flag; use --set=num_layers=…"),
    (["--platform=gpu"], "--platform=gpu is not cpu; leave it out: accelerators are used if there are any"),
    (["--size=8bb"], "seed_oss_36b; did you mean 8b?"),
    (["--matmul_backward=bfloat16"], "--matmul_backward=bfloat16 is for low-precision matmuls, and --matmul is empty; add --matmul=int8 or --matmul=fp8"),
    (["--matmul_emulate"], "--matmul_emulate=True is for low-precision matmuls, and --matmul is empty; add"),
    (["--reduce_dtype=float32", "--matmul=int8"], "reduce_dtype=float32 is for matmuls in dtype, and matmul=int8; use other flags of the model"),
    (["--keep_best"], "--keep_best needs --eval_every; add it, for example --eval_every=100"),
    (["--profile=10"], "--profile=10 is not FIRST:LAST; try --profile=10:15"),
    (["--profile=0:2"], "--profile=0:2: this run takes steps 1 to 3; profile steps that it takes"),
    (["--profile=1:1", "--workdir={here}/run", "--steps=3"], "--profile=1:1: this run takes steps 2 to 3; profile steps that it takes"),
    (["--profile=1:1", "--restore_from={here}/run", "--steps=0"], "--profile=1:1: this run takes no steps; profile steps that it takes"),
    (["--accumulate=3"], "--batch_size=16 is not divisible by --accumulate=3; try --batch_size=15"),
    (["--mesh=4x2", "--accumulate=16"], "--batch_size=16 in --accumulate=16 parts leaves 1 to each, not divisible by the 4 shards of 'batch' (rules 'fsdp_tp' on --mesh=4x2); try --batch_size=64"),
    (["--process_id=1"], "--process_id=1 needs --num_processes; add it"),
    (["--num_processes=2"], "--process_id is not given with --num_processes=2; give each process a number from 0 to 1"),
    (["--num_processes=2", "--process_id=2"], "--process_id=2 with --num_processes=2; give each process a number from 0 to 1"),
    (["--num_processes=2", "--process_id=0"], "--coordinator= is not HOST:PORT; use process 0's host and a free port"),
    (["--num_processes=2", "--process_id=0", "--coordinator=host:99999"], "--coordinator=host:99999 is not HOST:PORT; use process 0's host and a free port"),
]  # fmt: skip

MESH_ROWS = [
    (["--mesh=4x"], "--mesh=4x is not a mesh; write sizes"),
    (["--mesh=²x2"], "--mesh=²x2 is not a mesh; write sizes"),
    (["--mesh=0x8"], "--mesh=0x8 has an axis of size 0; give an unused axis size 1"),
    (["--mesh=4x2x2x2"], "--mesh=4x2x2x2 has 4 sizes, but only 3 axes have default names; write sizes"),
    (["--mesh=data=2,data=4"], "--mesh=data=2,data=4 names axis 'data' twice; name each once"),
    (["--mesh=data=two"], "'data=two' is not name=size; write sizes"),
    (["--mesh=data=2,seq=4", "--rules=cp", "--seq_len=30"], "rows of 30 tokens are not divisible by the 4 shards of 'seq' (rules 'cp' on --mesh=data=2,seq=4); try --seq_len=32"),
    (["--mesh=data=1,seq=3", "--rules=cp", "--context=all-to-all", "--seq_len=33"], "--context=all-to-all shares out 16 heads over 3 devices (rules 'cp' on --mesh=data=1,seq=3); use --context=ring"),
    (["--mesh=data=2,pipe=4"], "rules 'fsdp_pp' split dim 'layers' of layers/attention/k [2, 64, 8, 8] over 4 devices (mesh axis 'pipe' of --mesh=data=2,pipe=4), and 2 is not divisible by 4; meshes that fit: --mesh=data=2,pipe=2"),
    (["--mesh=data=2,pipe=2", "--pipe_microbatches=3"], "--pipe_microbatches=3 does not divide the 8 rows of a device; use a divisor"),
    (["--pipe_microbatches=4"], "--pipe_microbatches=4 is for a pipeline, and rules 'fsdp_tp' on --mesh=2x2 have none; use --pipe_microbatches=0, or a mesh with `pipe`"),
    (["--mesh=data=2,seq=4", "--rules=fsdp"], "rules 'fsdp' use no mesh axis 'seq', so the 4 devices along it (--mesh=data=2,seq=4) would all do the same work; use --rules="),
    (["--mesh=4x4"], "--mesh=4x4 needs 16 devices, found 8; try --mesh=4x2"),
    (["--mesh=4x4x4"], "--mesh=4x4x4 needs 64 devices, found 8; try --mesh=2x2x2"),
    (["--mesh=100x100"], "--mesh=100x100 needs 10000 devices, but at most 1024 can be simulated; try --mesh=4x2"),
    (["--mesh=" + "9" * 5000], "is not a mesh; write sizes"),
    (["--mesh=1x3", "--rules=tp"], "split dim 'mlp' of layers/mlp/down [2, 128, 64] over 3 devices"),
    (["--mesh=4x2", "--batch_size=6"], "--batch_size=6 is not divisible by the 4 shards of 'batch' (rules 'fsdp_tp' on --mesh=4x2); try --batch_size=8"),
    (["--mesh=8", "--rules=tp"], "rules 'tp' need mesh axis 'model' (for 'heads'), and --mesh=8 has 'data'; try --mesh=4x2"),
    (["--mesh=4x2", "--rules=hsdp_tp"], "rules 'hsdp_tp' need mesh axis 'fsdp' (for 'batch'), and --mesh=4x2 has 'data' and 'model'; try --mesh=2x2x2"),
    (["--mesh=8", "--rules=fsdp_cp_tp"], "has 'data'; try --mesh=data=2,seq=2,model=2"),
    (["--mesh=4x2", "--rules=FSDP-TP"], "--rules=FSDP-TP is not a strategy of this entry; did you mean 'fsdp_tp'?"),
    (["--mesh=4x2", "--rules=fsdp_ep"], "--rules=fsdp_ep is not a strategy of this entry; it has dp, zero1"),
    (["--mesh=4x2", "--rules=fdsp"], "--rules=fdsp is not a strategy of this entry; did you mean 'fsdp'?"),
    (["--mesh=4x2", "--rules=x"], "--rules=x is not a strategy of this entry; it has dp, zero1, fsdp, tp_sp, fsdp_tp_sp, hsdp_tp_sp, tp, fsdp_tp, hsdp_tp, cp, fsdp_cp, fsdp_cp_tp, pp, pp_zero1, fsdp_pp, fsdp_pp_tp"),
    (["--mesh=4x2", "--sample_rules=nope"], "--sample_rules=nope is not a strategy of this entry; it has dp,"),
    (["--mesh=data=2,pipe=2", "--sample_rules=pp"], "--sample_rules=pp has 2 stages of layers, which can't generate; use --sample_rules=fsdp, for example"),
]  # fmt: skip

SET_ROWS = [
    (["--set=norm_eps"], "--set=norm_eps has no value; write --set=FIELD=VALUE"),
    (["--set=unrol=2"], "--set=unrol is not one of lora_rank,"),
    (["--set=unrol=2"], "; did you mean unroll?"),
    (["--set=MAY_BE_ZERO=1"], "--set=MAY_BE_ZERO is not one of lora_rank,"),  # a class variable
    (["--set=unroll=two"], "unroll=two is not a whole number; use a different value"),
    (["--set=unroll=0"], "unroll=0 must be ≥ 1; use a different value"),
    (["--set=norm_eps=small"], "norm_eps=small is not a finite number; use a different value"),
    (["--set=qk_norm=maybe"], "qk_norm=maybe is not true or false; use a different value"),
    (["--set=sliding_window=wide"], "sliding_window=wide is not a whole number, or none; use a different value"),
    (["--set=vocab_size=256"], "vocab_size=256 is less than the 257 tokens of the tokenizer; use --set=vocab_size=257, or leave it out"),
    (["--set=layer_kinds=[[3]]"], "layer_kinds=[[3]] is not a list of [window, rope_theta] or [window,"),
    (["--set=attention=splash"], "--set=attention=splash doesn't support cpu devices; use --set=attention=auto"),
    (["--set=attention=cudnn"], "--set=attention=cudnn doesn't support cpu devices; use --set=attention=auto"),
    (["--set=attention=fast"], "attention='fast' is not one of auto, "),
    (["--set=norm_eps=-1"], "norm_eps=-1.0 must be a finite number ≥ 0; use other flags of the model"),
    (["--set=rope_theta=0"], "rope_theta=0.0 must be a finite number > 1; use other flags of the model"),
    (["--set=logits_divisor=1e-30"], "logits_divisor=1e-30 must be from 1e-06 to 1e+06; use other flags"),
    (['--set=rope_scaling={"rope_type": "yarn", "factor": 4}'], "--set=rope_scaling has original_max_position_embeddings null, which must be a number > 0; use a different value"),
    (['--set=rope_scaling={"rope_type": "ntk"}'], "--set=rope_scaling has rope_type 'ntk'; use one of linear, llama3"),
    (['--set=rope_scaling={"type": "linear", "scale": 4}'], "--set=rope_scaling has 'scale', which is not one of "),
    (["--set=num_kv_heads=3"], "num_heads=16 is not divisible by num_kv_heads=3; use other flags of the model"),
    (["--set=remat=full"], "--set=remat=full is for fields without a flag; use --remat=full"),
    (["--workdir={here}/run", "--set=norm_eps=1e-6"], "--set=norm_eps=1e-6 must match the original run, none; use that, or a different --workdir (this one is {here}/run)"),
]  # fmt: skip

RULES_ROWS = [
    (["--rules={here}/no.json"], "--rules={here}/no.json can't be read (No such file or directory); fix the path"),
    (["--rules={here}/folder.json"], "--rules={here}/folder.json can't be read (Is a directory); fix the path"),
    (["--rules={here}/broken.json"], "--rules={here}/broken.json is not JSON (Expecting ',' delimiter: line 1 column 17 (char 16)); fix the file"),
    (["--rules={here}/list.json"], "--rules={here}/list.json is not a JSON object; write {\"batch\": \"data\", ...}"),
    (["--rules={here}/number.json"], "--rules={here}/number.json maps 'mlp' to 3; use the name of a mesh axis, a list of names, or null"),
    (["--rules={here}/typo.json"], "rules '{here}/typo.json' name logical axis 'embd', unknown to the model; did you mean 'embed'?"),
    (["--rules={here}/unknown.json"], "rules '{here}/unknown.json' name logical axis 'experts', unknown to the model; it has batch, seq, residual_seq, slots, act_embed, "),
    (["--rules={here}/expert.json"], "rules '{here}/expert.json' need mesh axis 'expert' (for 'mlp'), and --mesh=2x2 has 'data' and 'model'; try --mesh=data=2,expert=2"),
    (["--rules={here}/twice.json"], "rules '{here}/twice.json' use mesh axis 'model' twice on layers/mlp/down, for 'mlp' and 'embed'; replicate one of the two (None, or null in JSON)"),
]  # fmt: skip

WORKDIR_ROWS = [
    (["--workdir={here}/file"], "--workdir={here}/file can't be written (Not a directory); use a different --workdir"),
    (["--workdir={here}/file/run"], "--workdir={here}/file/run can't be written (Not a directory); use a different --workdir"),
    (["--workdir=/proc/run"], "--workdir=/proc/run can't be written ("),
    (["--workdir=gs:/b/run"], "--workdir=gs:/b/run has no ://; use gs://b/run, or a local path"),
    (["--workdir={here}/another"], "has entry 'mlp', not 'transformer'; use a different one"),
    (["--workdir={here}/run", "--seed=1"], "--seed=1 must match the original run, 0; use that, or a different --workdir (this one is {here}/run)"),
    (["--workdir={here}/run", "--mesh=4x2", "--batch_size=6"], "--batch_size=6 must match the original run, 16; use that"),
    (["--workdir={here}/older", "--optimizer=lion"], "--optimizer=lion must match the original run, adamw"),
    (["--workdir={here}/run", "--pack=true"], "--pack=true must match the original run, none; use that, or a different --workdir"),
    (["--workdir={here}/run", "--dataset={here}/ok.txt"], "--dataset={here}/ok.txt must match the original run"),
    (["--workdir={here}/run", "--restore_from={here}/run"], "--restore_from={here}/run must match the original run, none"),
    (["--workdir={here}/damaged"], "--workdir={here}/damaged has no intact checkpoint (step 1: metadata/metadata is not the JSON that was saved)"),
]  # fmt: skip

RESTORE_ROWS = [
    (["--restore_from={here}/no"], "--restore_from={here}/no does not exist; use a run's workdir or a checkpoint; the zoo has dot_relu_dot.teacher, mlp.digits, siglip.digits, transformer.stdlib_3m"),
    (["--restore_from=s3:b/run"], "--restore_from=s3:b/run has no ://; use gs://b/run, or a local path"),
    (["--restore_from={here}/empty"], "--restore_from={here}/empty holds no checkpoint; use a run's workdir or a checkpoint; the zoo has dot_relu_dot.teacher, mlp.digits, siglip.digits, transformer.stdlib_3m"),
    (["--restore_from={here}/another"], "has entry 'mlp', not 'transformer'; use a different one"),
    (["--restore_from={here}/damaged"], "--restore_from={here}/damaged: metadata/metadata is not the JSON that was saved in {here}/damaged/checkpoints/1"),
    (["--restore_from={here}/strange"], "--restore_from={here}/strange: metadata/metadata has no 'config' in "),
    (["--restore_from={here}/newer", "--size="], "has 'experts'"),
    (["--restore_from={here}/odd", "--size="], "head_dim"),
    (["--restore_from={here}/no_state"], "state/commit_success.txt is missing"),
    (["--restore_from={here}/run", "--size=small"], "embed has shape [384, 64] in checkpoint {here}/run/checkpoints/1 and [384, 128] in this model; use the flags that the checkpoint was made with"),
    (["--restore_from={here}/run/checkpoints/7"], "does not exist"),
    (["--restore_from={here}/damaged", "--verify=false"], "metadata/metadata is not the JSON that was saved"),
]  # fmt: skip

LORA_ROWS = [
    (["--lora_rank=8"], "--lora_rank=8 trains an adapter on a trained model, and there is none; use --restore_from=… as well"),
    (["--lora_alpha=8"], "--lora_alpha=8.0 is for adapters, and --lora_rank=0 trains none; add, for example, --lora_rank=8"),
    (["--lora_targets=q"], "--lora_targets=q is for adapters, and --lora_rank=0 trains none; add"),
    (["--restore_from={here}/run", "--lora_rank=8", "--lora_targets=q,x"], "--lora_targets=q,x has 'x'; use all, or some of q,k,v,o,gate,up,down"),
    (["--restore_from={here}/run", "--base=x"], "--base=x is for adapters, and --restore_from={here}/run is not one; leave it out"),
    (["--restore_from={here}/adapter"], "--restore_from={here}/adapter is an adapter without its base (--base={here}/gone does not exist); use --base=PATH of the model that it was trained on"),
    (["--workdir={here}/adapter"], "--workdir={here}/adapter is an adapter without its base (--base={here}/gone does not exist); use --base=PATH"),
    (["--restore_from={here}/adapter", "--base={here}/damaged"], "is an adapter without its base (--base={here}/damaged: metadata/metadata is not the JSON that was saved in"),
    (["--restore_from={here}/adapter", "--base={here}/run"], "is an adapter of a model with SHA-256 00000000…, and {here}/run has "),
    (["--restore_from={here}/adapter", "--base={here}/adapter"], "is an adapter, and its base --base={here}/adapter is one too; use --base=PATH"),
    (["--restore_from=hf:{here}/peft"], "adapter_config.json has use_dora true, which the zoo does not implement; merge the adapter with PEFT, and use the merged model"),
]  # fmt: skip

DATA_ROWS = [
    (["--dataset={here}/no.txt"], "--dataset={here}/no.txt does not exist; use a file, a folder, or hf:NAME"),
    (["--dataset={here}/ok.txt, {here}/no.txt"], "--dataset={here}/no.txt does not exist"),
    (["--dataset="], "--dataset= is empty; use stdlib, a path, or hf:NAME"),
    (["--dataset=" + "x" * 300], "xxx can't be read (File name too long); use another"),
    (["--dataset=~nobody-of-this-name/a.txt"], "--dataset=~nobody-of-this-name/a.txt does not exist; use a file, a folder"),
    (["--dataset={here}/empty"], "--dataset={here}/empty is an empty folder; add text files to it"),
    (["--dataset={here}/short.txt"], "has 10 held-out tokens, fewer than one window of --seq_len=32 and its target; use more text or a shorter --seq_len"),
    (["--dataset=hf:no/such"], "--dataset=hf:no/such could not be loaded ("),
    (["--dataset=hf:"], "--dataset=hf: names no dataset; use hf:NAME"),
    (["--dataset={here}/*.csv"], "--dataset={here}/*.csv matches no file; check the pattern, and quote it in a shell"),
    (["--dataset={here}"], " among .jsonl or .parquet files; name the files to read with a pattern, as in 'FOLDER/*.jsonl'"),
    (["--dataset={here}/ok.txt@much"], "gives {here}/ok.txt the weight 'much', which is not a number; write {here}/ok.txt@0.5"),
    (["--dataset={here}/ok.txt@0"], "gives {here}/ok.txt the weight 0; use one from 0.000001 to 1000000"),
    (["--dataset={here}/ok.txt@nan,stdlib"], "gives {here}/ok.txt the weight nan; use one from"),
    (["--dataset=stdlib@0.5,@0.5"], "--dataset=stdlib@0.5,@0.5 has an empty name; use NAME@WEIGHT,NAME@WEIGHT"),
    (["--dataset={here}/ok.txt,{here}/short.txt", "--pack=true", "--seq_len=250"], "--dataset={here}/short.txt has 191 training tokens, fewer than one window of --seq_len=250 and its target"),
    (["--dataset={here}/torn.jsonl.gz"], "torn.jsonl.gz could not be read as json ("),
    (["--dataset={here}/torn.txt.zst"], "torn.txt.zst"),
    (["--eval_dataset={here}/no.txt"], "--eval_dataset={here}/no.txt does not exist; use a file, a folder, or hf:NAME"),
    (["--eval_dataset={here}/broken.jsonl"], "--eval_dataset={here}/broken.jsonl: broken.jsonl line 2 is not JSON (Expecting value); fix it"),
    (["--eval_dataset={here}/short.txt", "--seq_len=250"], "--dataset={here}/short.txt has 201 held-out tokens, fewer than one window of --seq_len=250"),
]  # fmt: skip

CHAT_ROWS = [  # a broken line, behind a good one and an empty one
    ('{"messages": [', "chat.jsonl line 3 is not JSON (Expecting value); fix it"),
    ('{"text": "a"}', "chat.jsonl line 3 has no 'messages', which the first row has; give all rows the same columns"),
    ('{"messages": "Hi"}', "chat.jsonl line 3: 'messages' is a string, not a list of messages; write [{\"role\": \"user\", \"content\": \"…\"}, …]"),
    ('{"messages": ["Hi"]}', "chat.jsonl line 3: message 1 is a string; write {\"role\": \"user\", \"content\": \"…\"}"),
    ('{"messages": [{"role": "bot", "content": "Hi"}]}', "chat.jsonl line 3: message 1 has the role \"bot\"; use one of system, developer, user, assistant, tool"),
    ('{"messages": [{"role": "user", "content": [1]}]}', "chat.jsonl line 3: the content of message 1 is a list, not a string; write it as text"),
    ('{"messages": [{"role": "user", "content": "Hi"}]}', "chat.jsonl line 3 has no message in which the assistant says something, so nothing to learn; remove it"),
    ("", "chat.jsonl has a single row, and one is held out to evaluate on; add rows, or use --eval_dataset=FILE"),
    ('{"messages": [{"role": "assistant", "content": "Hi"}]}', "chat.jsonl line 1 has messages, but the tokenizer bytes has no chat template; use a chat model's, or rows of text"),
    ('{"prompt": "a"}', "chat.jsonl line 3 has no 'completion', which the first row has; give all rows the same columns"),
    ('{"prompt": "a", "completion": ""}', "chat.jsonl line 3 has an empty completion, so nothing to learn; remove it"),
    ('{"prompt": "a", "completion": []}', "chat.jsonl line 3 mixes a text and a list in prompt and completion; use two texts, or two lists of messages"),
    ('{"prompt": 1, "completion": 2}', "chat.jsonl line 3: 'prompt' is a number, not a list of messages"),
    ('{"text": 1}', "chat.jsonl line 3 has no text in column 'text', which the rows before it have"),
]  # fmt: skip
CHAT = '{"messages": [{"role": "assistant", "content": "Hello"}]}'
PAIR, TEXT = '{"prompt": "a", "completion": "b"}', '{"text": "a"}'
NO_TEXT = ('{"text": 1}',)  # behind TEXT

SMALL_ROWS = [  # of the other recipes, which have the same code behind most flags
    ("mlp", ["--hidden=12", "--mesh=1x8"], "rules 'fsdp_tp' split dim 'hidden' of blocks/0/down/kernel [12, 64] over 8 devices (mesh axis 'model' of --mesh=1x8), and 12 is not divisible by 8; meshes that fit: --mesh=1x6, --mesh=1x4, --mesh=1x3"),
    ("mlp", ["--set=classes=3"], "--set=classes=3: the data decides classes; leave it out"),
    ("mlp", ["--set=norm_eps=-1"], "norm_eps=-1.0 must be ≥ 0; use a different value"),
    ("vit", ["--set=labels=[]"], "--set=labels=[]: the data decides labels; leave it out"),
    ("bert", ["--set=task=embed"], "--set=task=embed is for fields without a flag; use --task=embed"),
    ("bert", ["--set=task=classify", "--task=fill"], "--set=task=classify is for fields without a flag; use --task=classify"),
    ("bert", ["--mask_rate=0"], "--mask_rate=0 must be ≥ 0.01; try 0.15"),
    ("bert", ["--scale=5"], "--scale=5.0 is for --task=embed, and this run's task is fill; leave it out"),
    ("bert", ["--task=classify", "--pairs=ring"], "--pairs=ring is for --task=embed, and this run's task is classify; leave it out"),
    ("bert", ["--task=embed", "--pack=true"], "--pack=true is for --task=fill, and this run's task is embed; leave it out"),
    ("bert", ["--restore_from=hf:{here}/no"], "'{here}/no' does not exist; use a model folder"),
    ("bert", ["--restore_from=hf:no_org/model"], "no_org/model is no local folder, and HF_HUB_OFFLINE forbids"),
    ("mlp", ["--dataset=no/such"], "--dataset=no/such is not a folder; "),
    ("mlp", ["--image_column=x"], "--dataset=digits has no column 'x'; set --image_column to one of 'image', 'label'"),
    ("mlp", ["--restore_from=mlp.digits", "--embed=32"], "blocks/0/down/bias has shape [64] in checkpoint {zoo}/checkpoints/mlp.digits and [32] in this model; use the flags that the checkpoint was made with"),
    ("mlp", ["--restore_from=mlp.digits", "--dataset={here}/images"], "--dataset={here}/images needs a model with 4 inputs, and the checkpoint's has 64; use the dataset that it was trained on"),
    ("vit", ["--dataset=no/such"], "--dataset=no/such is not a folder; use digits, a folder with one subfolder for each class, or hf:NAME"),
    ("vit", ["--dataset={here}/pets"], "--dataset={here}/pets: {here}/pets/cat/1.png is not a readable picture; replace or remove it"),
    ("vit", ["--dataset={here}/single"], "--dataset={here}/single has no pictures (.png, .jpg, .jpeg) in {here}/single/cat; add some"),
    ("siglip", ["--pairs=all"], "pairs='all' is not one of gather, ring, local; use other flags of the model"),
    ("siglip", ["--set=vocab_size=256"], "vocab_size=256 is less than the 257 tokens of the tokenizer; use --set=vocab_size=257, or leave it out"),
    ("siglip", ["--set=max_positions=8"], "the caption 'the digit zero' has 14 bytes, and the model reads 8; use --set=max_positions=14, or shorter names of classes"),
    ("bert", ["--mask_rate=1.5"], "--mask_rate=1.5 must be at most 1.0"),
    ("bert", ["--task=classify", "--set=labels=[]"], "--set=labels=[]: the data decides labels; leave it out"),
    ("bert", ["--task=classify", "--dataset={here}/ok.txt"], "--dataset={here}/ok.txt: ok.txt is text without columns; use .jsonl, .parquet or .csv files"),
    ("bert", ["--task=embed", "--size=tiny", "--mesh=data=4,pipe=2"], "--task=embed needs all layers on every device, and --mesh=data=4,pipe=2 has them in 2 stages"),
    ("vit", ["--patch=3"], "image_size 8 is not divisible by 3; use other flags of the model"),
    ("vit", ["--image_column=x"], "--dataset=digits has no column 'x'; set --image_column to one of 'image', 'label'"),
    ("vit", ["--restore_from=mlp.digits"], "{zoo}/checkpoints/mlp.digits has entry 'mlp', not 'vit'; use a different one"),
    ("vit", ["--mesh=4x2", "--batch_size=6"], "--batch_size=6 is not divisible by the 4 shards"),
    ("vit", ["--mesh=4x2", "--rules=cp"], "--rules=cp is not a strategy of this entry; it has dp, zero1, fsdp, tp, fsdp_tp, hsdp_tp"),
    ("dot_relu_dot", ["--restore_from=mlp.digits"], "{zoo}/checkpoints/mlp.digits has entry 'mlp', not 'dot_relu_dot'; use a different one"),
    ("dot_relu_dot", ["--mesh=4x2", "--rules=pipeline"], "--rules=pipeline is not a strategy of this entry; it has dp, zero1, fsdp, tp, fsdp_tp, hsdp_tp"),
    ("moe", ["--mesh=data=2,expert=4", "--num_experts=6"], "rules 'fsdp_ep' split dim 'expert' of layers/experts/down [4, 6, 176, 128] over 4 devices (mesh axis 'expert' of --mesh=data=2,expert=4), and 6 is not divisible by 4; meshes that fit: --mesh=data=2,expert=2"),
    ("moe", ["--mesh=data=2,expert=4", "--rules=fsdp_tp"], "rules 'fsdp_tp' need mesh axis 'model' (for 'heads'), and --mesh=data=2,expert=4 has 'data' and 'expert'; try --mesh=2x4"),
    ("moe", ["--mesh=data=2,expert=4", "--rules=fsdp"], "rules 'fsdp' use no mesh axis 'expert', so the 4 devices along it (--mesh=data=2,expert=4) would all do the same work; use --rules=fsdp_ep"),
    ("moe", ["--mesh=data=2,expert=2,model=2", "--rules=tp"], "would all do the same work; use --rules=fsdp_ep_tp"),
    ("moe", ["--mesh=data=2,stage=4"], "rules 'fsdp' use no mesh axis 'stage', so the 4 devices along it (--mesh=data=2,stage=4) would all do the same work; use --mesh=8"),
    ("moe", ["--experts_per_token=9"], "experts_per_token=9 is more than num_experts=8; use other flags of the model"),
    ("moe", ["--capacity=0"], "capacity=0.0 must be > 0, or None for dropless; use other flags of the model"),
    ("moe", ["--capacity=nan"], "capacity=nan is not a finite number, or none; use a different value"),
    ("gpt2", ["--seq_len=2048"], "--seq_len=2048 is more than the 1024 positions that the model learns; use at most --seq_len=1024"),
    ("deepseek", ["--mesh=data=4,pipe=2"], "rules 'fsdp_pp' split dim 'layers' of layers/attention/kv_down [3, 128, 80] over 2 devices (mesh axis 'pipe' of --mesh=data=4,pipe=2), and 3 is not divisible by 2; meshes that fit: --mesh=data=4,pipe=1"),
    ("deepseek", ["--mesh=data=4,pipe=2", "--size=tiny", "--mtp_depth=1"], "--mesh=data=4,pipe=2 has 2 stages of layers, and mtp_depth=1 has a layer after the last stage; use --mtp_depth=0, or a mesh without `pipe`"),
    ("qwen3_next", ["--mesh=data=4,pipe=2", "--size=tiny", "--mtp_depth=1"], "--mesh=data=4,pipe=2 has 2 stages of layers, and mtp_depth=1 has a layer after the last stage; use --mtp_depth=0, or a mesh without `pipe`"),
    ("deepseek", ["--num_experts=6"], "groups=4 must divide num_experts=6 into groups of ≥ 2; use other flags of the model"),
    ("deepseek", ["--mtp_depth=2"], "mtp_depth=2 is not one of 0, 1; use other flags of the model"),
    ("transformer", ["--mesh=data=2,expert=4", "--size=tiny"], "rules 'fsdp' use no mesh axis 'expert', so the 4 devices along it (--mesh=data=2,expert=4) would all do the same work; use --mesh=8"),
]  # fmt: skip

PUBLISH_ROWS = [
    ([], "--source is missing; use --source=DIR"),
    (["--source={here}/run"], "--target is missing; use --target=DIR"),
    (["--source={here}/run", "--target={here}/empty"], "--target={here}/empty already exists; use a new name"),
    (["--source={here}/run", "--target={here}/file"], "--target={here}/file already exists; use a new name"),
    (["--source={here}/run", "--target={here}/file/x", "--licence=x"], "--target={here}/file/x can't be written (Not a directory); use a different folder"),
    (["--source=hf:{here}/run", "--target={here}/x"], "--source=hf:{here}/run is not a checkpoint of this zoo; use a run's workdir or a checkpoint"),
    (["--source={here}/no", "--target={here}/x"], "--source={here}/no does not exist; use a run's workdir or a checkpoint"),
    (["--source={here}/empty", "--target={here}/x"], "--source={here}/empty holds no checkpoint; use a run's workdir or a checkpoint"),
    (["--source={here}/damaged", "--target={here}/x"], "--source={here}/damaged: metadata/metadata is not the JSON that was saved"),
    (["--source={here}/no_state", "--target={here}/x"], "state/commit_success.txt is missing"),
    (["--source={here}/unknown", "--target={here}/x", "--licence=x"], "has entry 'gpt'; this zoo has dot_relu_dot, mlp, transformer"),
    (["--source=mlp.digits", "--target={here}/x"], "--source=mlp.digits is already published; use a run's workdir or its checkpoint"),
    (["--source={here}/imported", "--target={here}/x"], "does not come from a training run; use a run's workdir or its checkpoint"),
    (["--source={here}/run", "--target={here}/x"], "book.txt; use --licence=NAME"),
    (["--source={here}/tuned", "--target={here}/x"], "--licence is missing, and the zoo knows none for --restore_from=hf:a/b; use --licence=NAME"),
    (["--source={here}/run", "--target={here}/x", "--licence=x", "--mesh=1x3"], "over 3 devices (mesh axis 'model' of --mesh=1x3)"),
    (["--source={here}/run", "--target={here}/x", "--licence=x", "--rules=tpp"], "--rules=tpp is not a strategy of this entry; did you mean 'tp'?"),
    (["--steps=3"], "--steps is not a flag; --help lists the flags"),
]  # fmt: skip

ROWS = (
    FLAG_ROWS
    + SET_ROWS
    + MESH_ROWS
    + RULES_ROWS
    + WORKDIR_ROWS
    + RESTORE_ROWS
    + LORA_ROWS
    + DATA_ROWS
)
AS_COMMANDS = [
    FLAG_ROWS[0],
    # More devices than this process has.
    (["--mesh=3x3"], "over 3 devices (mesh axis 'data' of --mesh=3x3), and 64 is not divisible by 3; meshes that fit: --mesh="),
    *(rows[0] for rows in (MESH_ROWS, RULES_ROWS, WORKDIR_ROWS, RESTORE_ROWS, LORA_ROWS, DATA_ROWS)),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("here")


@pytest.fixture
def here(place, inside, quick, book):
    """A folder with the files that the rows name: good and bad data, workdirs and checkpoints."""
    if not any(place.iterdir()):
        flags = (*TINY, book, "--mesh=1x1", "--steps=1", f"--workdir={place / 'run'}")
        assert inside("recipes.transformer", *flags).code == 0
        fill(place)
    return place


def fill(folder: pathlib.Path) -> None:
    """Adds all other files to a folder with a run."""

    def copy(name: str, change) -> None:
        """Copies a run; `change` is a function of its metadata, or a text to replace it."""
        shutil.copytree(folder / "run", folder / name)
        checkpoint = folder / name / "checkpoints" / "1"
        path = checkpoint / "metadata" / "metadata"
        metadata = json.loads(path.read_text())
        path.write_text(change if isinstance(change, str) else json.dumps(change(metadata)))
        integrity.hash_before_commit(checkpoint)  # else every change is found by its hash

    copy("another", lambda m: m | {"entry": "mlp"})
    copy("damaged", "{")
    copy("unknown", lambda m: m | {"entry": "gpt"})
    copy(
        "tuned",
        lambda m: (
            m
            | {
                "data": m["data"] | {"dataset": "stdlib"},
                "flags": m["flags"] | {"restore_from": "hf:a/b"},
            }
        ),
    )
    copy("imported", lambda m: m | {"data": {}})
    younger = ("optimizer", "schedule")  # flags that its run did not know
    flags = lambda m: {k: v for k, v in m["flags"].items() if k not in younger}  # noqa: E731
    copy("older", lambda m: m | {"flags": flags(m)})
    copy("strange", lambda m: {k: v for k, v in m.items() if k != "config"})
    copy("newer", lambda m: m | {"config": m["config"] | {"experts": 8}})
    copy("odd", lambda m: m | {"config": m["config"] | {"head_dim": 7}})
    base = {"path": str(folder / "gone"), "sha256": "0" * 64}
    copy("adapter", lambda m: m | {"base": base})
    (folder / "peft").mkdir()
    (folder / "peft" / "adapter_config.json").write_text('{"r": 8, "use_dora": true}')
    copy("no_state", lambda m: m)
    shutil.rmtree(folder / "no_state" / "checkpoints" / "1" / "state")
    for name in ("empty", "folder.json", "images", "pets/cat", "single/cat"):
        (folder / name).mkdir(parents=True)
    files = {
        "file": b"no folder", "pets/cat/1.png": b"no picture", "pets/cat/2.png": b"", "ok.txt": b"some text " * 500,
        "broken.jsonl": b'{"text": "a"}\n{"text": \n', "torn.jsonl.gz": b"\x1f\x8b\x08", "torn.txt.zst": b"zst", "short.txt": b"x" * 200,
        **{f"images/{split}.jsonl": b'{"image": [0, 1, 2, 3], "label": 1}\n' for split in ("train", "test")},
    }  # fmt: skip
    tables = {
        "list": '["data"]', "broken": '{"batch": "data"', "number": '{"mlp": 3}',
        "typo": '{"embd": "data"}', "unknown": '{"experts": "data"}',
        "expert": '{"mlp": "expert"}', "twice": '{"mlp": "model", "embed": "model"}',
    }  # fmt: skip
    files |= {f"{name}.json": text.encode() for name, text in tables.items()}
    for name, content in files.items():
        (folder / name).write_bytes(content)


def everything(folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """All files with their times, and all folders."""
    found = folder.rglob("*")
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in found}


def identify(row) -> str:
    return " ".join([*row[:-2], *row[-2]])[:60]


EXACT = {
    "--step is not a flag; did you mean --steps?",
    "--batch_size=16 is not divisible by --accumulate=3; try --batch_size=15",
    "--mesh=4x4 needs 16 devices, found 8; try --mesh=4x2",
    "rules '{here}/typo.json' name logical axis 'embd', unknown to the model; did you mean 'embed'?",
    "--workdir={here}/file can't be written (Not a directory); use a different --workdir",
}


def values(message: str) -> list[str]:
    """The words of a message that are no prose: flags, numbers, names in quotes, paths, fields."""
    words = [word.strip(".,;:()[]?…") for word in message.split()]
    return [word for word in words if re.search(r"""[\d=_/"]|--|^'""", word)]


def check(done, message, here):
    assert done.code == 2, done.err
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, "one line"
    assert done.err.endswith("\n")
    text = message.replace("{here}", str(here)).replace("{zoo}", str(ROOT / "zoo"))
    if message in EXACT:
        assert done.err == f"error: {text}\n"
    assert values(text) or text in done.err
    for value in values(text):
        ends = r"(?!\w)" if value.isdigit() else ""  # 8 isn't in 80
        assert re.search(rf"(?<![\w.]){re.escape(value)}{ends}", done.err), (value, done.err)
    assert len(done.err) < 700


def placed(flags, here) -> list[str]:
    return [flag.replace("{here}", str(here)) for flag in flags]


def command_line(flags, here, book) -> list[str]:
    flags = placed(flags, here)
    given = {flag.split("=")[0] for flag in flags}
    defaults = (*FLAGS, book, "--mesh=2x2", f"--workdir={here}/new{len(ROWS)}")
    return [*(flag for flag in defaults if flag.split("=")[0] not in given), *flags]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Resets the flags of several processes after a test."""
    monkeypatch.setattr(processes, "_count", 1)


@pytest.mark.parametrize("row", ROWS, ids=identify)
def test_a_user_error_is_one_line(row, inside, here, book):
    before = everything(here)
    done = inside("recipes.transformer", *command_line(row[0], here, book))
    check(done, row[1], here)
    assert everything(here) == before, "something was written"


@pytest.mark.promise("chats")
@pytest.mark.parametrize(("line", "message"), CHAT_ROWS, ids=range(len(CHAT_ROWS)))
def test_a_broken_row_is_named_by_its_line(line, message, inside, here, book, tmp_path):
    path = tmp_path / "chat.jsonl"
    good = PAIR if "prompt" in line else TEXT if line in NO_TEXT else CHAT
    path.write_text(f"{good}\n\n{line}\n")
    flags = command_line([f"--dataset={path}"], here, book)
    before = everything(here)
    check(inside("recipes.transformer", *flags), message, here)
    assert everything(here) == before


@pytest.mark.parametrize("row", SMALL_ROWS, ids=identify)
def test_a_user_error_of_another_recipe_is_one_line(row, inside, here):
    before, (recipe, flags, message) = everything(here), row
    done = inside(f"recipes.{recipe}", f"--workdir={here}/new", *placed(flags, here))
    check(done, message, here)
    assert everything(here) == before, "something was written"


@pytest.mark.parametrize("row", PUBLISH_ROWS, ids=identify)
def test_a_user_error_in_publishing_is_one_line(row, inside, here):
    before = everything(here)
    check(inside("recipes.publish", *placed(row[0], here)), row[1], here)
    assert everything(here) == before, "something was written"


@pytest.mark.parametrize(
    ("flags", "message"),
    full_except(AS_COMMANDS, [AS_COMMANDS[1]]),
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_a_user_error_as_a_command(flags, message, run, here, book):
    before, used = everything(here), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("recipes.transformer", *command_line(flags, here, book))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    print(f"{seconds:.1f} s of processor time")
    check(done, message, here)
    assert everything(here) == before


def test_a_workdir_that_is_read_only(inside, here, book, tmp_path):
    place = tmp_path
    place.chmod(0o555)
    if os.geteuid() == 0:  # root writes into every folder of a disk, and this one is on none
        place = "/sys"
    flags = command_line([f"--workdir={place}/run"], here, book)
    check(inside("recipes.transformer", *flags), f"--workdir={place}/run can't be written (", here)


def test_a_cache_that_can_not_be_made(inside, here, book, monkeypatch):
    monkeypatch.setenv("ZOO_CACHE", f"{here}/file")
    done = inside("recipes.transformer", *command_line([], here, book))
    check(done, "{here}/file can't be written (Not a directory); make room, or set ZOO_CACHE", here)
