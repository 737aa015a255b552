"""Models of transformers, diffusers and peft, of random weights, and what users do with them. See `KINDS`."""

from functools import partial

import diffusers
import kinds_of_modules
import peft
import torch
import transformers
from kinds_of_modules import Kind, given, here, ids
from torch import nn

KINDS: dict[str, Kind] = {}
TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
USUAL = {**SIZES, **TOKENS, "max_position_embeddings": 64}
GROUPED = {**USUAL, "num_key_value_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 3}


def kind(name, make, work, *, steady=True):
    assert name not in KINDS, name
    KINDS[name] = Kind(make, work, steady)


def mask(rows, columns):
    made = torch.ones(rows, columns, dtype=torch.int64)
    made[0, -2:] = 0
    return made.to(kinds_of_modules.DEVICE)


def tensors(output):
    """An output's tensors, without caches, which are objects of the library."""
    return {name: value for name, value in output.items() if name not in ("past_key_values", "cache")}


def read(model):
    return tensors(model(input_ids=ids(2, 6), attention_mask=mask(2, 6)))


def transformer(family, config, work=read, *, head="Model", steady=True, **sizes):
    def make():
        return getattr(transformers, family + head)(getattr(transformers, f"{config}Config")(**sizes))

    kind(f"transformers {family}{head}", make, work, steady=steady)


for family in (
    "Bert",
    "Roberta",
    "Electra",
    "MPNet",
    "Ernie",
    "Nystromformer",
    "RoFormer",
    "XLMRoberta",
    "Camembert",
):
    transformer(family, family, **USUAL)
for family in (
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Phi3",
    "StableLm",
    "Olmo",
    "Olmo2",
    "Starcoder2",
    "Cohere",
):
    transformer(family, family, head="ForCausalLM", **GROUPED)
for family in ("Granite", "Gemma", "Gemma2", "Phi", "Helium", "SmolLM3", "Glm", "Nemotron"):
    transformer(
        family,
        family,
        head="ForCausalLM",
        **GROUPED,
        **({"head_dim": 8} if "Gemma" in family or family in ("Glm", "Helium") else {}),
    )
transformer("Gemma3", "Gemma3Text", head="ForCausalLM", **GROUPED, head_dim=8)
transformer("Mixtral", "Mixtral", head="ForCausalLM", **GROUPED, num_local_experts=4)
transformer(
    "Qwen2Moe",
    "Qwen2Moe",
    head="ForCausalLM",
    **GROUPED,
    num_experts=4,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
transformer("GPTNeoX", "GPTNeoX", head="ForCausalLM", **USUAL)
transformer(
    "Falcon",
    "Falcon",
    head="ForCausalLM",
    **TOKENS,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
)
transformer("Bloom", "Bloom", head="ForCausalLM", **TOKENS, hidden_size=32, n_layer=2, n_head=4)
transformer(
    "OPT",
    "OPT",
    head="ForCausalLM",
    **TOKENS,
    hidden_size=32,
    ffn_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    word_embed_proj_dim=16,
    max_position_embeddings=64,
)
transformer("GPT2", "GPT2", head="LMHeadModel", **TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64)
transformer(
    "GPTJ", "GPTJ", head="ForCausalLM", **TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4
)
transformer(
    "GPTNeo",
    "GPTNeo",
    head="ForCausalLM",
    **TOKENS,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    attention_types=[[["global", "local"], 1]],
    window_size=4,
)
transformer("DistilBert", "DistilBert", **TOKENS, dim=32, hidden_dim=48, n_layers=2, n_heads=4)
transformer("Albert", "Albert", **USUAL, embedding_size=16)
transformer("DebertaV2", "DebertaV2", **USUAL, relative_attention=True, pos_att_type=["p2c", "c2p"])
transformer(
    "Mamba",
    "Mamba",
    lambda m: tensors(m(input_ids=ids(2, 6), use_cache=False)),
    head="ForCausalLM",
    **TOKENS,
    hidden_size=32,
    num_hidden_layers=2,
    state_size=4,
)
transformer(
    "FNet", "FNet", lambda m: tensors(m(input_ids=ids(2, 6))), **SIZES, **TOKENS, max_position_embeddings=64
)
transformer("ModernBert", "ModernBert", **USUAL)
transformer(
    "XLNet",
    "XLNet",
    lambda m: m(input_ids=ids(2, 6)).last_hidden_state,
    vocab_size=99,
    d_model=32,
    n_layer=2,
    n_head=4,
    d_inner=48,
)
transformer(
    "Longformer",
    "Longformer",
    lambda m: tensors(m(input_ids=ids(2, 8), attention_mask=mask(2, 8))),
    **USUAL,
    attention_window=4,
)
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 99,
    "decoder_start_token_id": 0,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}


def both(model):
    return model(input_ids=ids(2, 6), attention_mask=mask(2, 6), decoder_input_ids=ids(2, 4)).logits


transformer("T5", "T5", both, head="ForConditionalGeneration", **T5)
transformer("Bart", "Bart", both, head="ForConditionalGeneration", **BART, **TOKENS)
transformer("Pegasus", "Pegasus", both, head="ForConditionalGeneration", **BART, **TOKENS)
transformer(
    "Marian",
    "Marian",
    both,
    head="MTModel",
    **BART,
    **{**TOKENS, "pad_token_id": 98, "decoder_start_token_id": 98},
)
for family in ("ViT", "DeiT", "Dinov2", "Beit"):
    transformer(family, family, lambda m: m(given(1, 3, 16, 16)).last_hidden_state, **SIZES, **IMAGES)
transformer(
    "ConvNext",
    "ConvNext",
    lambda m: m(given(1, 3, 32, 32)).last_hidden_state,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
)
transformer(
    "ResNet",
    "ResNet",
    lambda m: m(given(1, 3, 32, 32)).last_hidden_state,
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
)
transformer(
    "Swin",
    "Swin",
    lambda m: m(given(1, 3, 16, 16)).last_hidden_state,
    image_size=16,
    patch_size=2,
    embed_dim=8,
    depths=[2, 1],
    num_heads=[2, 2],
    window_size=2,
)
transformer(
    "Segformer",
    "Segformer",
    lambda m: m(given(1, 3, 32, 32)).last_hidden_state,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2],
)
transformer("CLIPText", "CLIPText", **SIZES, **TOKENS, max_position_embeddings=64)
transformer("CLIPVision", "CLIPVision", lambda m: m(given(1, 3, 16, 16)).last_hidden_state, **SIZES, **IMAGES)
transformer(
    "SiglipVision", "SiglipVision", lambda m: m(given(1, 3, 16, 16)).last_hidden_state, **SIZES, **IMAGES
)
SPEECH = {
    "conv_dim": [8, 8],
    "conv_kernel": [3, 3],
    "conv_stride": [2, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
transformer(
    "Wav2Vec2", "Wav2Vec2", lambda m: m(given(1, 64)).last_hidden_state, **SIZES, **SPEECH, vocab_size=99
)
transformer("Hubert", "Hubert", lambda m: m(given(1, 64)).last_hidden_state, **SIZES, **SPEECH, vocab_size=99)
transformer(
    "Whisper",
    "Whisper",
    lambda m: m(given(1, 8, 40), decoder_input_ids=ids(1, 4)).last_hidden_state,
    **{**BART, "max_source_positions": 20, "max_target_positions": 20, "num_mel_bins": 8},
    **TOKENS,
    decoder_start_token_id=1,
)


def llama(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, **more}))


def written(model, **options):
    return model.generate(
        ids(2, 5),
        attention_mask=torch.ones_like(ids(2, 5)),
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        **options,
    )


kind("generation", llama, written, steady=False)
kind("generation with tied weights", partial(llama, tie_word_embeddings=True), written, steady=False)
kind("generation with beams", llama, partial(written, num_beams=3), steady=False)
kind(
    "generation with a static cache",
    llama,
    partial(written, cache_implementation="static", disable_compile=True),
    steady=False,
)
kind("generation without a cache", llama, partial(written, use_cache=False), steady=False)
kind(
    "attention by eager operations",
    partial(llama, attn_implementation="eager"),
    lambda m: tensors(m(ids(2, 5), output_attentions=True)),
)
kind("hidden states of all layers", llama, lambda m: m(ids(2, 5), output_hidden_states=True).hidden_states)
kind(
    "embeddings given instead of ids",
    llama,
    lambda m: m(inputs_embeds=m.get_input_embeddings()(ids(2, 5))).logits,
)
kind(
    "a model asked what it takes",
    llama,
    lambda m: (m.num_parameters(), m.dtype, m.get_memory_footprint() > 0),
)

# diffusers


def latents():
    return {"hidden_states": given(1, 4, 8, 8)}


def unet():
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )


def conditioned():
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def vae():
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )


def tiled(model):
    model.enable_tiling()
    model.enable_slicing()
    return model.decode(given(2, 4, 4, 4)).sample


kind("a net of noise", unet, lambda m: m(given(1, 3, 8, 8), 3).sample)
kind("a net of noise with words", conditioned, lambda m: m(given(1, 4, 8, 8), 3, given(1, 5, 16)).sample)
kind("an autoencoder", vae, lambda m: m(given(1, 3, 8, 8)).sample)
kind("an autoencoder that encodes", vae, lambda m: m.encode(given(1, 3, 8, 8)).latent_dist.mean, steady=False)
kind("an autoencoder that decodes", vae, lambda m: m.decode(given(1, 4, 4, 4)).sample, steady=False)
kind("an autoencoder in tiles", vae, tiled, steady=False)
kind(
    "a small autoencoder",
    lambda: diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    lambda m: m(given(1, 3, 8, 8)).sample,
)
kind(
    "a transformer of noise",
    lambda: diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    ),
    lambda m: m(given(1, 4, 8, 8), timestep=here(3), class_labels=here(1)).sample,
    steady=False,
)
kind(
    "a transformer of two streams",
    lambda: diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    lambda m: (
        m(
            given(1, 4, 8, 8),
            encoder_hidden_states=given(1, 5, 16),
            pooled_projections=given(1, 8),
            timestep=here(3),
        ).sample
    ),
)

# peft


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}) for _ in range(3)
        )

    def forward(self, given):
        for layer in self.layers:
            given = given + layer["down"](torch.relu(layer["up"](given)))
        return given


def adapted(config, *more):
    def make():
        model = peft.get_peft_model(Net(), config)
        for name in more:
            model.add_adapter(name, config)
        for name, one in model.named_parameters():
            if "lora" in name or "ada" in name or "hada" in name or "ia3" in name:
                nn.init.normal_(one, std=0.1)  # else most begin with zeros
        return model

    return make


LORA = peft.LoraConfig(target_modules=["up", "down"], r=4)


def run(model):
    return model(given(3, 16))


def toggled(model):
    with model.disable_adapter():
        without = run(model)
    return without, run(model)


def chosen(model):
    found = []
    for name in ("other", "default"):
        model.set_adapter(name)
        found.append(run(model))
    return found


def merged(model):
    model.merge_adapter()
    found = run(model)
    model.unmerge_adapter()
    return found


kind("adapters", adapted(LORA), run)
kind("adapters switched off and on", adapted(LORA), toggled, steady=False)
kind("two adapters by turns", adapted(LORA, "other"), chosen, steady=False)
kind("adapters merged", adapted(LORA), merged, steady=False)
kind("adapters of bias and weight", adapted(peft.LoraConfig(target_modules=["up"], bias="all", r=4)), run)
kind(
    "adapters with directions",
    adapted(peft.LoraConfig(target_modules=["up", "down"], r=4, use_dora=True)),
    run,
)
kind(
    "adapters with directions switched off and on",
    adapted(peft.LoraConfig(target_modules=["up", "down"], r=4, use_dora=True)),
    toggled,
    steady=False,
)
kind(
    "adapters that scale",
    adapted(peft.IA3Config(target_modules=["up", "down"], feedforward_modules=["down"])),
    run,
)
kind("adapters of products", adapted(peft.LoHaConfig(target_modules=["up", "down"], r=2)), run)
kind("adapters of kronecker products", adapted(peft.LoKrConfig(target_modules=["up", "down"], r=2)), run)
kind("adapters that turn", adapted(peft.OFTConfig(target_modules=["up", "down"], oft_block_size=4)), run)
kind("adapters that are shared", adapted(peft.VeraConfig(target_modules=["down"], r=4)), run)
kind("adapters that are frozen", adapted(LORA), lambda m: (m.requires_grad_(False), run(m))[1], steady=False)


def frozen_one_by_one(model):
    for one in model.parameters():
        one.requires_grad = False
    return run(model)


kind("parameters frozen one by one", Net, frozen_one_by_one, steady=False)
