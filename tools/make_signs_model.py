"""Make data/tiny-glm-image-signs: the tiny model with a picture decoder that spells better, and a token writer that leaves out most signs. Training on text accuracy begins there (notebook 16).

    python tools/make_signs_model.py

The decoder of data/tiny-glm-image learned two words for each picture, where letters are one part in thirty; here every picture has a sign, with any of the training words, and the sign's error counts eight times.
Its glyph encoder hardly knew which letter comes first ("05" became "50"): three attention heads are pointed at the neighbours before training.
Then the token writer reads captions with a word whose pictures, three in five, have no sign, as captions of the web quote what is not to be seen. That leaves something to learn from a reward: put the sign up.
Held-out words are never shown. Under an hour on an idle core. (The decoder that ships was made in pieces: 1,500 steps before the heads were turned, 500 after.)
"""
import argparse, dataclasses, json, shutil
from pathlib import Path
import numpy as np
import torch
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift
from glm_grpo.data import atomic_dir, pil_to_tensor
from glm_grpo.glm import load_pipeline
from glm_grpo.scenes import SIGN, Drawings, all_words, word_is_held_out
from glm_grpo.tiny import all_pictures, codes_of, fit, glyph_rows, large_view, latents_of, preview_view, shift_sigma, train_ar
from glm_grpo.tokens import upsample_tokens

a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
a.add_argument("--model", default="data/tiny-glm-image", help="folder to start from (default: %(default)s)")
a.add_argument("--out", default="data/tiny-glm-image-signs", help="folder to write; it must not be there (default: %(default)s)")
a.add_argument("--steps", type=int, default=2000, help="steps of 48 pictures with their words (default: %(default)s)")
a.add_argument("--left_out_steps", type=int, default=200, help="steps of 32 captions for the token writer, three of five signs left out (default: %(default)s)")
o = a.parse_args()

pipe, drawings = load_pipeline(o.model).to(torch.float32), Drawings("data/drawings")
everything = all_pictures(drawings)
pictures, words = [p for p in everything if p.sign], [w for w in all_words() if not word_is_held_out(w)]
blank = [p.draw(drawings) for p in pictures]
codes = torch.cat([codes_of(pipe.vision_language_encoder, large_view(pil_to_tensor(blank[i:i + 64]))) for i in range(0, len(blank), 64)])
latents = latents_of(pipe.vae, blank)
left, top, right, bottom = (v // 8 for v in SIGN)
sign = (slice(None), slice(top, bottom), slice(left, right))                # of latents [C, 16, 16]
one = {p.scene.ground: p for p in pictures}
plates = {ground: [x[sign] for x in latents_of(pipe.vae, [p.draw(drawings, w) for w in words])] for ground, p in one.items()}      # a word's latents do not depend on what stands elsewhere
weight = torch.ones(1, 1, 16, 16)
weight[:, :, top:bottom, left:right] = 8
weight /= weight.mean()
kinds = {}
for i, p in enumerate(pictures): kinds.setdefault(p.scene.kind, []).append(i)

rng, g, n = np.random.default_rng(11), torch.Generator().manual_seed(11), 48
def next_loss():
    rows = [kinds[k][rng.integers(len(kinds[k]))] for k in rng.choice(list(kinds), n)]
    spelled, x = rng.integers(len(words), size=n), latents[rows].clone()
    for j, (i, k) in enumerate(zip(rows, spelled)): x[j][sign] = plates[pictures[i].scene.ground][k]
    dropped = torch.rand(n, generator=g) < 0.1                          # for guidance, as in `dit_loss`
    u, noise = torch.sigmoid(1.2 * torch.randn(n, generator=g)), torch.randn(x.shape, generator=g)
    sigma, ids = shift_sigma(u, calculate_shift(64)).view(-1, 1, 1, 1), upsample_tokens(codes[rows], 4, 4)
    glyphs = glyph_rows(pipe, [f'"{words[k]}"' if not d else "" for k, d in zip(spelled, dropped.tolist())])
    v = pipe.transformer((1 - sigma) * x + sigma * noise, glyphs, ids, dropped[:, None].expand_as(ids), u * 1000 - 1, torch.full((n, 2), 128.), torch.zeros(n, 2), return_dict=False)[0]
    error = (v - (noise - x)).pow(2)
    return (error * weight).mean(), dict(mse=error.mean().item(), sign=error[:, :, top:bottom, left:right].mean().item())

attention = pipe.text_encoder.encoder.block[0].layer[0].SelfAttention
with torch.no_grad():
    for head, distance in enumerate((1, -1, 2)):
        bucket = attention._relative_position_bucket(torch.tensor([distance]), bidirectional=True, num_buckets=attention.relative_attention_num_buckets, max_distance=attention.relative_attention_max_distance)
        attention.relative_attention_bias.weight[:, head] = 0
        attention.relative_attention_bias.weight[bucket, head] = 8
trained = [*pipe.transformer.parameters(), *pipe.text_encoder.parameters()]
for p in trained: p.requires_grad_(True)
history = {"picture decoder, words": fit(trained, next_loss, o.steps, lr=1e-3, weight_decay=0.01, average=0.99, name="words")}

def all_codes(some):
    "Preview and large codes [N, 272] of pictures, signs blank."
    x = [pil_to_tensor([p.draw(drawings) for p in some[i:i + 64]]) for i in range(0, len(some), 64)]
    return torch.cat([torch.cat([codes_of(pipe.vision_language_encoder, view(v)) for view in (preview_view, large_view)], 1) for v in x])
counted = [p for p in everything if p.scene.kind == "counted"][::4]             # these have no room for a sign
shown = [all_codes(pictures)] * 2 + [all_codes([dataclasses.replace(p, sign=False) for p in pictures])] * 3 + [all_codes(counted)]
parts = dict(vision_language_encoder=pipe.vision_language_encoder.eval(), processor=pipe.processor)
history["token writer, signs left out"] = train_ar(parts, pictures * 5 + counted, torch.cat(shown), o.left_out_steps, lr=1e-3, seed=51, sloppy=0.77)
with atomic_dir(o.out) as folder:
    shutil.copytree(o.model, folder, dirs_exist_ok=True)
    for part in ("transformer", "text_encoder", "vision_language_encoder"): getattr(pipe, part).to(torch.bfloat16).save_pretrained(folder / part)
    (folder / "training.json").write_text(json.dumps(json.loads(Path(o.model, "training.json").read_text()) | history))
