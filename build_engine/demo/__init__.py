"""The demo checkpoint: synthetic conversations, the trainer, the packed weights and their expansion.

Life of the demo: `kinds` (the table, over talk, facts, arithmetic, text, tools and turns) gives conversations,
`dataset` packs them into batches, `train` trains `network` with `muon` and the `rounding` of the engine's formats,
`check` counts held-out samples, `pack` writes `weights.xz`, and `expand` turns that into a Hugging Face checkpoint
folder. Only `pack` and `expand` run in the demo itself; training also needs tiktoken.

Recipe: 4 layers, hidden 256, intermediate 192, 8 experts (top 4), 16 query and 2 KV heads of 64; batches of 72 rows
of 512 tokens with a document mask, no sample repeated; Muon (0.02) on projections and experts, AdamW (2e-3) on the
rest, rates constant for 40% of the steps and then falling to zero, load-balance loss 0.01; loss weight 1 on what the
model writes and 0.05 elsewhere; the last quarter with MXFP4 expert weights and FP8 activations. Unused ids are
prepared by 4,096 random rows, drawn anew each step, in the softmax and in the place of some words of the prompts.

The shipped weights come from two runs on one H200 (14 processes making data, 29 to 34 ms a step):

    python -m gptoss_trt.build_engine.demo.train --out A --compile --workers 14 --seconds 285
    python -m gptoss_trt.build_engine.demo.train --out B --compile --workers 14 --seconds 192 --rate 0.6 \\
        --start A/weights.xz

8,235 and 4,096 steps, 455 million tokens, 496 s. At that time the end of earlier answers still had the small weight of
prompts; it has none now. `held_out.json` holds the second run's counts: 19,378 of 19,500 held-out steps exact, analysis
included, and 73 of 78 kinds at 0.97 or more. The same command without `--compile` runs on a CPU: at some 1,500 tokens/s
on two cores, the 97 million tokens of the default 2,640 steps take 18 hours. A run that was stopped goes on with
`--resume A/state.pt`.

`head` packs and expands `eagle_head.xz`, an EAGLE-3 head of these weights for trying speculation: 1.2 million weights,
1,024 of the ids. It learned in 8 minutes on a shared CPU core from the engine's hidden states over 2,025 training
samples, of which the demo writes 93,167 tokens (tests/perf/eagle_demo.py --documents 3000 --minutes 8), to 66, 65 and
62% right in the three steps of a chain.

Both files come from the synthetic text of this folder alone, and are under the project's licence.
"""

from pathlib import Path

PACKED_WEIGHTS = Path(__file__).with_name("weights.xz")
PACKED_HEAD = Path(__file__).with_name("eagle_head.xz")
