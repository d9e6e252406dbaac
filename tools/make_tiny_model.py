"""Makes data/tiny-glm-image, which the default run trains, from random weights: under two hours
on two cores. With --signs it makes data/tiny-glm-image-signs from it, for training on text.

    python tools/make_tiny_model.py --out /tmp/tiny
    python tools/make_tiny_model.py --signs --out /tmp/signs

`data/tiny-glm-image/README.md` tells why each stage is there. The committed weights were made with
these stages, but in several sittings with other numbers of steps, which their training.json has.
"""

import argparse
import json
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, count, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import GlmImagePipeline
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift
from make_edits import EDITS, Edit
from PIL import Image
from scene_sets import all_scenes, has_room, render, split_of, words_of
from torch import Tensor, nn
from tqdm import tqdm

from glm_grpo.data.basics import atomic_dir
from glm_grpo.data.images import pil_to_tensor
from glm_grpo.rewards.scenes import GROUNDS, PLACES, SIDE, SIGN, Drawings, Scene
from glm_grpo.model.latents import Source, latent_statistics, source_cache
from glm_grpo.model.loading import load_pipeline
from glm_grpo.model.tokens import prepare_prompts, upsample_tokens

DRAWINGS = Drawings("data/drawings")
WORDS = words_of("pretrain")
SHARES = {"single": 0.30, "counted": 0.40, "pair": 0.30}  # kinds of scenes in a batch
bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)
BATCH, CAPTIONS = 48, 32  # images of a step of the DiT, and edits of the AR; its captions
LEFT, TOP, RIGHT, BOTTOM = (v // 8 for v in SIGN)
SIGN_AREA = (slice(None), slice(TOP, BOTTOM), slice(LEFT, RIGHT))  # of latents [C, 16, 16]

TINY = "data/tiny-glm-image"


def make_pipeline(captions: list[str]) -> GlmImagePipeline:
    "The committed model's parts and sizes with random weights; the captions train its tokenizer."
    pipe = load_pipeline(TINY)
    tokenizer, sampling = pipe.processor.tokenizer, pipe.vision_language_encoder.generation_config
    pipe.processor.tokenizer = tokenizer.train_new_from_iterator(captions, len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name in ("vision_language_encoder", "transformer", "text_encoder", "vae"):
            part = getattr(pipe, name)
            build = getattr(type(part), "from_config", type(part))
            setattr(pipe, name, build(part.config).float())
    pipe.vision_language_encoder.generation_config = sampling
    return pipe


# Pictures, captions and edits


@dataclass(frozen=True)
class Picture:
    scene: Scene  # without a word
    hand: str  # the emoji set of its drawings
    corners: tuple[int, ...]  # of counted objects
    sign: bool

    def draw(self, word: str | None = None) -> Image.Image:
        "With a word on the sign; without one the sign is blank, as in pictures that become tokens."
        scene = replace(self.scene, word=(word or "AA") if self.sign else None)
        how = {"hand": self.hand, "corners": self.corners, "letters": word is not None}
        return render(scene, DRAWINGS, **how)

    def other(self, **changes) -> "Picture":
        return replace(self, scene=replace(self.scene, **changes))


def all_pictures() -> list[Picture]:
    "Every scene of the pre-training set by every hand, in every layout, with and without a sign."
    found = []
    for scene in all_scenes(DRAWINGS.objects):
        if split_of(scene) == "pretrain":
            layouts = list(combinations(range(4), scene.count)) if scene.count > 1 else [()]
            signs = (False, True) if has_room(scene) else (False,)
            found += [Picture(scene, *how) for how in product(DRAWINGS.hands, layouts, signs)]
    return found


class Captions:
    "Random pictures in fixed shares of the three kinds, with a random word for each sign."

    def __init__(self, pictures: list[Picture], seed: int, sloppy: float = 0.0):
        self.pictures, self.rng = pictures, np.random.default_rng(seed)
        self.sloppy = sloppy  # share of captions with a randomly chosen ground
        self.by_kind = []
        for kind in SHARES:
            self.by_kind.append([i for i, p in enumerate(pictures) if p.scene.kind == kind])

    def choose(self, items):
        return items[self.rng.integers(len(items))]

    def sample(self, number: int) -> tuple[list[int], list[str | None]]:
        "Numbers of pictures, and the words on their signs."
        kinds = self.rng.choice(len(SHARES), number, p=list(SHARES.values()))
        rows = [self.choose(self.by_kind[kind]) for kind in kinds]
        return rows, [self.choose(WORDS) if self.pictures[i].sign else None for i in rows]

    def caption(self, i: int, word: str | None) -> str:
        scene = self.pictures[i].scene
        if self.sloppy and self.rng.random() < self.sloppy:
            grounds = [replace(scene, ground=ground) for ground in GROUNDS]
            split = split_of(scene)
            scene = self.choose([other for other in grounds if split_of(other) == split])
        return replace(scene, word=word).prompt()


class Edits:
    "Random pairs of pictures that differ in one thing, the four kinds in equal shares."

    def __init__(self, pictures: list[Picture], seed: int):
        self.pictures, self.rng = pictures, np.random.default_rng(seed)
        words = {}  # picture without its ground -> two words of one sort; [None] without a sign
        for picture in pictures:
            if (family := picture.other(ground="")) not in words:
                first = self.choose(WORDS)
                words[family] = [None]
                if picture.sign:
                    alike = [w for w in WORDS if w != first and w.isdigit() == first.isdigit()]
                    words[family] = [first, self.choose(alike)]
        self.shown = []  # (number of a picture, its word): what is edited
        for i, picture in enumerate(pictures):
            self.shown += [(i, word) for word in words[picture.other(ground="")]]
        number_of = {(pictures[i], word): n for n, (i, word) in enumerate(self.shown)}
        self.targets = {kind: {} for kind in EDITS}  # kind -> source -> targets
        for (picture, word), source in number_of.items():
            scene, own = picture.scene, words[picture.other(ground="")]
            grounds = [ground for ground in GROUNDS if ground != scene.ground]
            ends = {"recolour": [(picture.other(ground=ground), word) for ground in grounds]}
            ends["change"] = [(picture, new) for new in own if new != word]
            if not picture.sign:
                signed = replace(picture, sign=True)
                ends["add"] = [(signed, new) for new in words.get(signed.other(ground=""), [])]
                places = [place for place in PLACES if scene.place and place != scene.place]
                ends["move"] = [(picture.other(place=place), word) for place in places]
            for kind, wanted in ends.items():
                if found := [number_of[end] for end in wanted if end in number_of]:
                    self.targets[kind][source] = found
        self.sources = {kind: list(ends) for kind, ends in self.targets.items() if ends}

    choose = Captions.choose

    def scene(self, number: int) -> Scene:
        i, word = self.shown[number]
        return replace(self.pictures[i].scene, word=word)

    def sample(self, number: int, sloppy: float = 0.0):
        "Sources, targets (numbers of `shown`), and edits; `sloppy`: share of wrong instructions."
        sources, targets, edits = [], [], []
        for kind in self.rng.choice(list(self.sources), number).tolist():
            source = self.choose(self.sources[kind])
            ends = self.targets[kind][source]
            target = described = self.choose(ends)
            if self.rng.random() < sloppy:
                described = self.choose(ends)
            sources.append(source)
            targets.append(target)
            edits.append(Edit(self.scene(source), self.scene(described), kind))
        return sources, targets, edits


# Training


def fit(parameters, next_loss, steps, lr, weight_decay, average=0.0, name="") -> list[dict]:
    """AdamW with a warm-up and a cosine schedule, on `next_loss() -> (loss, numbers to show)`. At
    the end the weights become their moving average with the decay `average`. Returns the log."""
    parameters, log, seen = list(parameters), [], {}
    for p in parameters:
        p.requires_grad_(True)
    matrices = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay}
    vectors = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, vectors], lr=lr, betas=(0.9, 0.98))
    averages = [p.detach().clone() for p in parameters]
    bar = tqdm(range(steps), name, mininterval=5)
    for step in bar:
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * (min(1, (step + 1) / 50) * (0.02 + 0.98 * cosine))
        loss, shown = next_loss()
        seen |= shown
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        # a smaller decay in the first steps, so that the initial weights lose their influence
        share = 1 - min(average, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, share)
        if step % 20 == 19 or step == steps - 1:
            log.append({"step": step + 1, **seen})
            bar.set_postfix({key: f"{value:.3f}" for key, value in seen.items()})
    with torch.no_grad():
        torch._foreach_copy_(parameters, averages)
    return log


def spoil(token_ids: Tensor, generator: torch.Generator, rows: float) -> Tensor:
    "In a share of the rows, a random share of the tokens becomes that of other rows."
    n = len(token_ids)
    share = torch.rand(n, 1, generator=generator)
    share = share * (torch.rand(n, 1, generator=generator) < rows)
    others = torch.randint(n, token_ids.shape, generator=generator)
    replaced = torch.rand(token_ids.shape, generator=generator) < share
    return torch.where(replaced, token_ids.gather(0, others), token_ids)


def ar_loss(ar, inputs, answers: Tensor, history: Tensor) -> tuple[Tensor, dict]:
    "Cross-entropy of preview, large grid and end mark; a token of the large grid counts thrice."
    n, length = inputs.input_ids.shape
    with bfloat16():
        hidden = ar.model.language_model(
            input_ids=torch.cat([inputs.input_ids, history], 1),
            attention_mask=torch.cat([inputs.attention_mask, torch.ones_like(history)], 1),
            position_ids=torch.cat([inputs.position_ids, inputs.decode_position_ids], 2),
            use_cache=False,
        ).last_hidden_state
        logits = ar.lm_head(hidden[:, length - 1 :])
    expected = F.pad(answers, (0, 1), value=ar.config.image_end_token_id)
    logits = logits.float().flatten(0, 1)
    nats = F.cross_entropy(logits, expected.flatten(), reduction="none").view(n, -1)
    weights = torch.ones(nats.shape[1])
    weights[-17:-1] = 3
    loss = (nats * weights).sum() / (n * weights.sum())
    large = nats[:, -17:-1].mean().item()
    if len(inputs.grids) == 1:  # an edit has no preview
        return loss, {"edit": large}
    return loss, {"preview": nats[:, :-17].mean().item(), "large": large}


def train_ar(pipe, data, steps, lr, seed, spoilt=0.7, sloppy=0.0, with_edits=False) -> list[dict]:
    "On 32 captions a step; with edits, three steps of four are 48 edits, six in ten sloppy."
    ar, processor = pipe.vision_language_encoder, pipe.processor
    captions, generator = Captions(data.pictures, seed, sloppy), torch.Generator().manual_seed(seed)
    turn = count()

    def next_loss():
        if with_edits and next(turn) % 4:
            sources, targets, edits = data.edits.sample(BATCH, sloppy=0.6)
            prompts = [edit.prompt() for edit in edits]
            images = [[data.shown[source]] for source in sources]
            inputs = prepare_prompts(processor, ar, prompts, SIDE, SIDE, images)
            answers = data.token_ids[[data.edits.shown[target][0] for target in targets], -16:]
        else:
            rows, words = captions.sample(CAPTIONS)
            prompts = [captions.caption(i, word) for i, word in zip(rows, words)]
            inputs = prepare_prompts(processor, ar, prompts, SIDE, SIDE)
            answers = data.token_ids[rows]
        return ar_loss(ar, inputs, answers, spoil(answers, generator, spoilt))

    trained = [*ar.model.language_model.parameters(), *ar.lm_head.parameters()]
    return fit(trained, next_loss, steps, lr, weight_decay=0.05, name="AR")


def train_vae(vae, pictures: list[Picture], steps, seed, decoder_only=False) -> list[dict]:
    "On 4 pictures a step, with their words; `decoder_only` keeps the latents as they are."
    captions, generator = Captions(pictures, seed), torch.Generator().manual_seed(seed)

    def sample(number):
        drawn = [pictures[i].draw(word) for i, word in zip(*captions.sample(number))]
        return pil_to_tensor(drawn) * 2 - 1

    def next_loss():
        x = sample(4)
        with bfloat16():
            with torch.set_grad_enabled(not decoder_only):
                posterior = vae.encode(x).latent_dist
            z = posterior.mode() if decoder_only else posterior.sample(generator)
            y = vae.decode(z).sample.float()
        mean, var, logvar = (t.float() for t in (posterior.mean, posterior.var, posterior.logvar))
        kl = 0.5 * (mean.pow(2) + var - 1 - logvar).mean()
        square = (y - x).pow(2).mean()
        loss = (y - x).abs().mean() + 2 * square + 2e-4 * kl
        return loss, {"mse": square.item(), "kl": kl.item()}

    trained = vae.decoder if decoder_only else vae
    log = fit(trained.parameters(), next_loss, steps, 2e-3, weight_decay=0.01, name="VAE")
    if not decoder_only:
        with torch.no_grad():
            z = torch.cat([vae.encode(sample(16)).latent_dist.mode() for _ in range(16)])
        statistics = {"latents_mean": z.mean((0, 2, 3)), "latents_std": z.std((0, 2, 3))}
        vae.register_to_config(**{name: value.tolist() for name, value in statistics.items()})
    return log


@torch.no_grad()
def latents_of(vae, images: list[Image.Image]) -> Tensor:  # [N, 16, 16, 16]
    "Normalised latents, the DiT's input."
    mean, std = latent_statistics(vae)
    modes = [vae.encode(x * 2 - 1).latent_dist.mode() for x in pil_to_tensor(images).split(32)]
    return (torch.cat(modes) - mean) / std


def velocity_error(pipe, latents, large_ids, words, generator, drop=0.1, sources=None) -> Tensor:
    "Flow matching: squared error of the velocity, like latents; a share of rows is unconditional."
    n = len(latents)
    dropped = torch.rand(n, generator=generator) < drop
    u = torch.sigmoid(1.2 * torch.randn(n, generator=generator))
    noise = torch.randn(latents.shape, generator=generator)
    mu = calculate_shift(latents[0, 0].numel() // pipe.transformer.config.patch_size**2)
    # the latent is mixed at the shifted noise level, and the DiT gets the unshifted time
    sigma = (mu * u / (mu * u + 1 - u)).view(-1, 1, 1, 1)
    texts = [f'"{w}"' if w and not out else "" for w, out in zip(words, dropped.tolist())]
    rows = {text: pipe._get_glyph_embeds([text])[0] for text in sorted(set(texts))}
    longest = max(map(len, rows.values()))
    glyphs = [F.pad(rows[text], (0, 0, longest - len(rows[text]), 0)) for text in texts]
    ids = upsample_tokens(large_ids, 4, 4)
    v = pipe.transformer(
        (1 - sigma) * latents + sigma * noise,
        torch.stack(glyphs),
        ids,
        dropped[:, None].expand_as(ids),
        u * 1000 - 1,
        target_size=torch.full((n, 2), float(SIDE)),
        crop_coords=torch.zeros(n, 2),
        kv_caches=source_cache(pipe, sources and [[source] for source in sources]),
        return_dict=False,
    )[0]
    return (v.float() - (noise - latents)).pow(2)


def fit_dit(pipe, next_loss, steps, lr, average) -> list[dict]:
    trained = [*pipe.transformer.parameters(), *pipe.text_encoder.parameters()]
    return fit(trained, next_loss, steps, lr, weight_decay=0.01, average=average, name="DiT")


def train_dit(pipe, data, latents, steps, lr, seed, with_edits=False) -> list[dict]:
    "On 48 captioned pictures a step, six in ten with a sign; with edits, on 24 and 24 edits."
    edits, large_ids = data.edits, data.token_ids[[i for i, _ in data.edits.shown], -16:]
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    groups = {}  # (kind of scene, whether there is a word) -> numbers of `shown`
    for number, (i, word) in enumerate(edits.shown):
        groups.setdefault((data.pictures[i].scene.kind, word is not None), []).append(number)

    def of_captions(number):
        kinds = rng.choice(list(SHARES), number, p=list(SHARES.values()))
        chosen = [groups.get((kind, rng.random() < 0.6), groups[kind, False]) for kind in kinds]
        rows = [group[rng.integers(len(group))] for group in chosen]
        words = [edits.shown[row][1] for row in rows]
        with bfloat16():
            error = velocity_error(pipe, latents[rows], large_ids[rows], words, generator).mean()
        return error, {"mse": error.item()}

    def of_edits(number):
        starts, ends, described = edits.sample(number)
        repeated = upsample_tokens(data.source_ids[starts], 4, 4)
        sources = [Source(latents[start], ids) for start, ids in zip(starts, repeated)]
        words = [e.target.word if e.kind in ("add", "change") else None for e in described]
        given = large_ids[ends], words, generator, 0.0, sources
        with bfloat16():
            error = velocity_error(pipe, latents[ends], *given).mean()
        return error, {"edit": error.item()}

    def next_loss():
        if not with_edits:
            return of_captions(BATCH)
        (captions, shown), (edited, more) = of_captions(BATCH // 2), of_edits(BATCH // 2)
        return (captions + edited) / 2, shown | more

    return fit_dit(pipe, next_loss, steps, lr, average=0.998)


# The codebook


def preview_view(images: Tensor) -> Tensor:  # [N, 3, 128, 128] in [0, 1] -> [N, 3, 256, 256]
    "The image that the tokens of the preview encode: low frequencies only."
    return F.interpolate(F.avg_pool2d(images, 4), scale_factor=8, mode="bilinear")


def large_view(images: Tensor) -> Tensor:  # [N, 3, 128, 128] in [0, 1] -> [N, 3, 64, 64]
    "The image that the tokens of the large grid encode: half the size, as of a source."
    return F.avg_pool2d(images, 2)


def patches_of(views: Tensor) -> Tensor:  # [N, 3, 16h, 16w] in [0, 1] -> [N, h*w, 768] in [-1, 1]
    "The vision tower's patches, as the processor packs them."
    n, c, height, width = views.shape
    tiles = (views * 2 - 1).view(n, c, height // 16, 16, width // 16, 16)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, c * 16 * 16)


@torch.no_grad()
def token_ids_of(ar, views: Tensor) -> Tensor:  # [N, 3, 16h, 16w] in [0, 1] -> [N, h*w] int64
    "The tokens of a view, from the model's vision tower and VQ."
    grid = torch.tensor([[1, views.shape[2] // 16, views.shape[3] // 16]] * len(views))
    features = ar.get_image_features(patches_of(views).flatten(0, 1), grid).pooler_output
    return ar.get_image_tokens(features, grid).view(len(views), -1)


def spherical_kmeans(f: Tensor, weights: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k-means on directions: f [M, d] and the result [k, d] have length 1. A centre without points
    moves to one of the points that fit worst."""
    first = torch.multinomial(weights, k, generator=generator, replacement=len(f) < k)
    centres = f[first].clone()
    for _ in range(25):
        cosine, nearest = (f @ centres.T).max(1)
        total = torch.zeros_like(centres).index_add_(0, nearest, f * weights[:, None])
        empty = torch.zeros(k).index_add_(0, nearest, weights) == 0
        num_empty = int(empty.sum())
        if num_empty <= len(f):
            total[empty] = f[cosine.topk(num_empty, largest=False).indices]
        else:
            total[empty] = centres[empty]
        centres = F.normalize(total, dim=-1)
    return centres


@torch.no_grad()
def fit_codebook(ar, images: Tensor) -> None:  # images [N, 3, 128, 128] in [0, 1]
    "Set the patch embedding by PCA and the codebook by spherical k-means."
    generator = torch.Generator().manual_seed(0)
    size, entries = ar.config.vq_config.embed_dim, ar.config.vq_config.num_embeddings
    previews = torch.cat([preview_view(chunk) for chunk in images.split(64)])
    large = torch.unique(patches_of(large_view(images)).flatten(0, 1), dim=0)
    small = torch.unique(patches_of(previews).flatten(0, 1), dim=0)
    small = small[torch.randperm(len(small), generator=generator)[: 4 * len(large)]]
    x = torch.cat([large, small])
    weights = torch.cat([torch.full((len(large),), 4.0), torch.ones(len(small))])

    # principal components of the patches, and a constant
    mean = x.mean(0)
    centred = (x - mean) * weights[:, None].sqrt()
    w, b = torch.zeros(size, x.shape[1]), torch.zeros(size)
    w[:-1] = torch.linalg.svd(centred, full_matrices=False)[2][: size - 1]
    b[:-1] = -(w[:-1] @ mean)
    b[-1] = 2 * (x - mean).pow(2).sum(1).mean().sqrt()

    visual, vq = ar.model.visual, ar.model.vqmodel
    embedding = visual.patch_embed.proj
    embedding.weight.copy_(w.view_as(embedding.weight))
    embedding.bias.copy_(b)
    visual.embeddings.position_embedding.weight.zero_()
    for block in visual.blocks:
        for layer in (block.attn.proj, block.mlp.fc2):
            layer.weight.zero_()
            layer.bias.zero_()

    f = F.normalize(x @ w.T + b, dim=-1)
    vq.quant_conv.weight.copy_(torch.eye(size)[:, :, None, None])
    vq.quant_conv.bias.zero_()
    vq.quantize.embedding.weight.copy_(spherical_kmeans(f, weights, entries, generator))


# The two models


def tokens_of(ar, images: list[Image.Image]) -> Tensor:  # [N, 272]: preview, then large grid
    found = []
    for x in pil_to_tensor(images).split(64):
        found.append(
            torch.cat([token_ids_of(ar, preview_view(x)), token_ids_of(ar, large_view(x))], 1)
        )
    return torch.cat(found)


def make_tiny() -> tuple[GlmImagePipeline, dict]:
    pictures = all_pictures()
    captions = Captions(pictures, 0)
    texts = [captions.caption(i, word) for i, word in zip(*captions.sample(4000))]
    pipe = make_pipeline(texts)
    ar, vae = pipe.vision_language_encoder, pipe.vae
    print(f"drawing {len(pictures)} pictures and fitting the codebook", flush=True)
    drawn = [picture.draw() for picture in pictures]
    some = np.random.default_rng(0).permutation(len(drawn))[:3000]
    fit_codebook(ar, pil_to_tensor([drawn[i] for i in some]))
    edits = Edits(pictures, 7)
    shown = [pictures[i].draw(word) for i, word in edits.shown]
    source_ids = []  # as the processor prepares a source
    for start in range(0, len(shown), 64):
        images = [[image] for image in shown[start : start + 64]]
        inputs = prepare_prompts(pipe.processor, ar, ["edit"] * len(images), SIDE, SIDE, images)
        source_ids += [ids for [(ids, _)] in inputs.sources]
    data = SimpleNamespace(pictures=pictures, edits=edits, shown=shown)
    data.token_ids, data.source_ids = tokens_of(ar, drawn), torch.stack(source_ids)
    logs = {
        "token writer": train_ar(pipe, data, 900, 2e-3, 1, spoilt=0.0),
        "token writer, history spoilt": train_ar(pipe, data, 750, 1.5e-3, 5),
        "token writer, sloppy captions": train_ar(pipe, data, 1500, 1.5e-3, 6, sloppy=0.77),
        "token writer, edits too": train_ar(pipe, data, 500, 1e-3, 7, sloppy=0.85, with_edits=True),
        "autoencoder": train_vae(vae, pictures, 2000, 2),
    }
    latents = latents_of(vae, shown)
    return pipe, logs | {
        "picture decoder": train_dit(pipe, data, latents, 3000, 2e-3, 3),
        "picture decoder, edits too": train_dit(pipe, data, latents, 400, 1e-3, 8, with_edits=True),
        "autoencoder, decoder only": train_vae(vae, pictures, 1300, 4, decoder_only=True),
    }


def train_spelling(pipe, pictures: list[Picture]) -> list[dict]:
    """On pictures with any of the words, whose sign counts eight times. Before, the glyph encoder
    hardly knew which letter comes first ("05" became "50")."""
    attention = pipe.text_encoder.encoder.block[0].layer[0].SelfAttention
    # three heads look at the next letter, the one before, and the one after the next
    for head, distance in enumerate((1, -1, 2)):
        bucket = attention._relative_position_bucket(torch.tensor([distance]))
        attention.relative_attention_bias.weight.data[:, head] = 0
        attention.relative_attention_bias.weight.data[bucket, head] = 8
    blank = [picture.draw() for picture in pictures]
    large_ids = tokens_of(pipe.vision_language_encoder, blank)[:, -16:]
    latents_of_blank, signs = latents_of(pipe.vae, blank), {}
    for ground, picture in {picture.scene.ground: picture for picture in pictures}.items():
        # a sign's latents do not depend on what stands elsewhere
        signs[ground] = latents_of(pipe.vae, [picture.draw(word) for word in WORDS])[:, *SIGN_AREA]
    weight = torch.ones(1, 1, 16, 16)
    weight[:, *SIGN_AREA] = 8
    weight /= weight.mean()
    by_kind = {}
    for i, picture in enumerate(pictures):
        by_kind.setdefault(picture.scene.kind, []).append(i)
    rng, generator = np.random.default_rng(11), torch.Generator().manual_seed(11)

    def next_loss():
        groups = [by_kind[kind] for kind in rng.choice(list(by_kind), BATCH)]
        rows = [group[rng.integers(len(group))] for group in groups]
        spelled = rng.integers(len(WORDS), size=BATCH)
        latents, words = latents_of_blank[rows], [WORDS[k] for k in spelled]
        for x, row, k in zip(latents, rows, spelled):
            x[SIGN_AREA] = signs[pictures[row].scene.ground][k]
        error = velocity_error(pipe, latents, large_ids[rows], words, generator)
        shown = {"mse": error.mean().item(), "sign": error[:, *SIGN_AREA].mean().item()}
        return (error * weight).mean(), shown

    return fit_dit(pipe, next_loss, 2000, 1e-3, average=0.99)


def make_signs() -> tuple[GlmImagePipeline, dict]:
    """The AR reads captions whose images, three in five, lack the sign that they name, so that a
    reward has something to teach. Held-out words are never shown."""
    pipe, pictures = load_pipeline(TINY).to(torch.float32), all_pictures()
    signed = [picture for picture in pictures if picture.sign]
    logs = {"picture decoder, words": train_spelling(pipe, signed)}
    unsigned = [replace(picture, sign=False) for picture in signed]
    counted = [picture for picture in pictures if picture.scene.kind == "counted"][::4]
    groups = [[picture.draw() for picture in group] for group in (signed, unsigned, counted)]
    with_sign, without, others = [tokens_of(pipe.vision_language_encoder, g) for g in groups]
    token_ids = torch.cat([with_sign] * 2 + [without] * 3 + [others])
    data = SimpleNamespace(pictures=signed * 5 + counted, token_ids=token_ids)
    logs["token writer, signs left out"] = train_ar(pipe, data, 200, 1e-3, 51, sloppy=0.77)
    return pipe, json.loads(Path(TINY, "training.json").read_text()) | logs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder to write; it must not be there")
    parser.add_argument("--signs", action="store_true", help="make the model for text")
    options = parser.parse_args()
    pipe, logs = make_signs() if options.signs else make_tiny()
    with atomic_dir(options.out) as folder:
        pipe.to(torch.bfloat16).save_pretrained(folder)
        for part in ("vision_language_encoder", "text_encoder"):
            # opened without a dtype, diffusers takes float32, and transformers what stands here
            config = folder / part / "config.json"
            config.write_text(config.read_text().replace('"bfloat16"', '"float32"'))
        (folder / "training.json").write_text(json.dumps(logs))


if __name__ == "__main__":
    main()
