"""`weir probe place FOLDER` on the CPU: a checkpoint that transformers wrote computes what it did before."""

import json
import sys

import pytest
import torch

from probes.cli import program
from probes.core.errors import Exit, UsageError
from probes.measure import placement_benchmark
from probes.measure.stacks import read_folder

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL = ["--machine", "h200", "--vram", "44MiB", "--host", "68MiB"]  # too little for `large` without disk
TOKENS = {"vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(placement_benchmark, "SAMPLES", 1)
    monkeypatch.setattr(placement_benchmark, "LEAST_S", 0.0)


@pytest.fixture
def outputs(monkeypatch):
    """What each way of running has returned."""
    kept = []
    real = placement_benchmark._measure

    def measured(how, built, inputs):
        found = real(how, built, inputs)
        kept.append((inputs, found[1]))
        return found

    monkeypatch.setattr(placement_benchmark, "_measure", measured)
    return kept


def qwen():
    config = transformers.Qwen2Config(**SIZES, **TOKENS, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config)


def large():
    """About 14 MiB in float32."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 24, "num_attention_heads": 4}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **TOKENS, num_key_value_heads=4))


def gpt2():
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 99, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES, **TOKENS))


def classifier():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **TOKENS))


def saved(make, folder, dtype=torch.float32):
    """The model as transformers itself loads it."""
    torch.manual_seed(0)
    made = make()
    made.to(dtype).save_pretrained(folder)
    return type(made).from_pretrained(folder, dtype=dtype).eval()


def words(folder, *more):
    return ["place", str(folder), "--vram", "4GiB", "--tokens", "6", "--batch", "2", *more]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [qwen, gpt2, bert, classifier])
def test_a_checkpoint_is_placed_in_its_own_dtype_with_the_unplaced_models_bits(
    make, dtype, tmp_path, outputs, capsys
):
    model = saved(make, tmp_path, dtype)
    assert program.main(words(tmp_path)) == Exit.OK
    said = capsys.readouterr().out
    assert str(dtype).removeprefix("torch.") in said
    assert "placed: " in said
    [(ids, got)] = outputs
    assert ids.shape == (2, 6)
    with torch.inference_mode():
        want = model(input_ids=ids)[0]
    assert got.dtype == dtype
    assert torch.equal(got, want)


def test_what_exceeds_host_memory_is_read_from_disk_and_has_the_same_bits(tmp_path, outputs, capsys):
    model = saved(large, tmp_path)
    assert program.main(words(tmp_path, *SMALL)) == Exit.OK
    assert "disk: " in capsys.readouterr().out
    [(ids, got)] = outputs
    with torch.inference_mode():
        assert torch.equal(got, model(input_ids=ids)[0])


def planned(folder, *more):
    """The folder's plan as a file, as a machine without the weights' program would make it."""
    file = folder.parent / "plan.json"
    where = ["--machine", "h200", "--vram", "44MiB", "--batch", "2", "--tokens", "6"]
    assert program.main(["plan", str(folder), *where, "--json", str(file), *more]) == Exit.OK
    return file


@pytest.mark.parametrize("make", [qwen, gpt2, bert, large])
def test_a_plan_that_was_written_before_is_followed_with_the_unplaced_models_bits(
    make, tmp_path, outputs, capsys
):
    model = saved(make, tmp_path / "model")
    file = planned(tmp_path / "model", "--host", "68MiB" if make is large else "4GiB")
    assert program.main(["place", str(tmp_path / "model"), "--plan", str(file)]) == Exit.OK
    said = capsys.readouterr().out
    assert ("disk: " in said) == (make is large)
    [(ids, got)] = outputs
    assert ids.shape == (2, 6)
    with torch.inference_mode():
        assert torch.equal(got, model(input_ids=ids)[0])


def test_a_plan_of_another_model_is_refused_and_nothing_is_kept(tmp_path, capsys):
    saved(qwen, tmp_path / "model")
    file = planned(tmp_path / "model")
    saved(bert, tmp_path / "other")
    assert program.main(["place", str(tmp_path / "other"), "--plan", str(file)]) == Exit.DEVICE
    assert "this isn't the model that was planned" in capsys.readouterr().err


@pytest.mark.parametrize("edit", [{"batch": 10**12}, {"batch": 2**62}, {}])
def test_an_edited_plan_that_no_memory_suffices_for_is_refused_without_a_traceback(edit, tmp_path, capsys):
    saved(qwen, tmp_path / "model")
    file = planned(tmp_path / "model")
    edited = json.loads(file.read_text())
    edited["workload"] |= edit
    edited["compute_dtype"] = "nn"
    file.write_text(json.dumps(edited))
    code = program.main(["place", str(tmp_path / "model"), "--plan", str(file)])
    assert code == (Exit.DEVICE if edit else Exit.OK)
    assert not edit or "try a smaller --batch" in capsys.readouterr().err


def test_a_plan_for_more_host_memory_than_is_here_is_refused_before_anything_is_loaded(
    tmp_path, capsys, monkeypatch
):
    saved(large, tmp_path / "model")
    file = planned(tmp_path / "model", "--vram", "43MiB")
    monkeypatch.setattr(placement_benchmark, "available_bytes", lambda _path: 1 << 20)
    assert program.main(["place", str(tmp_path / "model"), "--plan", str(file)]) == Exit.DEVICE
    assert "are free here" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "code"), [(63, Exit.DEVICE), (64, Exit.OK)])
def test_a_plan_needs_room_for_what_loading_takes_beside_it(more, code, tmp_path, capsys, monkeypatch):
    saved(large, tmp_path / "model")
    file = planned(tmp_path / "model", "--vram", "43MiB")
    host = json.loads(file.read_text())["host"]
    there = host["pinned"] + host["pageable"] + (more << 20)
    monkeypatch.setattr(placement_benchmark, "bytes_for_weights", lambda _asked: there)
    assert program.main(["place", str(tmp_path / "model"), "--plan", str(file)]) == code
    assert ("are free here" in capsys.readouterr().err) == (code != Exit.OK)


def test_a_host_without_gpu_and_room_is_told_how_much_would_do(tmp_path, capsys):
    saved(large, tmp_path)
    assert program.main(words(tmp_path, "--host", "72MiB")) == Exit.REQUIRED
    assert "--host 80MiB" in capsys.readouterr().err


def test_another_dtype_is_converted_to(tmp_path, outputs):
    kind = type(saved(qwen, tmp_path))
    assert program.main(words(tmp_path, "--dtype", "bfloat16")) == Exit.OK
    [(ids, got)] = outputs
    with torch.inference_mode():
        assert torch.equal(got, kind.from_pretrained(tmp_path, dtype=torch.bfloat16)(input_ids=ids)[0])


@pytest.mark.parametrize(("compute", "becomes"), [("auto", "float32"), ("float16", "float16")])
def test_a_card_without_bfloat16_units_is_stood_in_for(compute, becomes, tmp_path, outputs):
    model = saved(qwen, tmp_path, torch.bfloat16).to(getattr(torch, becomes))
    assert (
        program.main(words(tmp_path, "--machine", "wx4100", "--vram", "1GiB", "--compute", compute))
        == Exit.OK
    )
    [(ids, got)] = outputs
    assert got.dtype == getattr(torch, becomes)
    model.model.rotary_emb.inv_freq = type(model)(model.config).model.rotary_emb.inv_freq  # stays float32
    with torch.inference_mode():
        assert torch.equal(got, model(input_ids=ids)[0])


def test_the_verb_names_a_number_that_float16_cannot_hold(tmp_path, capsys, monkeypatch):
    model = qwen().to(torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = 70_000.0
    model.save_pretrained(tmp_path)
    assert program.main(words(tmp_path, "--machine", "wx4100", "--compute", "float16")) == Exit.DEVICE
    assert "layers.1.mlp.up_proj.weight can't be converted" in capsys.readouterr().err


def test_the_model_is_built_without_values(tmp_path):
    saved(qwen, tmp_path)
    module = placement_benchmark.build_checkpoint_model(read_folder(tmp_path), "float32", 6).module
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())


def test_comparing_needs_room_for_the_whole_model_in_host_memory(tmp_path, capsys):
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.Qwen2Config(**sizes, **TOKENS, num_key_value_heads=4)  # about 84 MiB in float32
    saved(lambda: transformers.Qwen2ForCausalLM(config), tmp_path)
    assert (
        program.main(words(tmp_path, "--host", "80MiB", "--machine", "h200", "--compare", "accelerate"))
        == Exit.DEVICE
    )
    assert "--compare needs the whole model in host memory" in capsys.readouterr().err


def test_comparing_without_a_gpu_is_refused_with_what_to_do(tmp_path, capsys):
    saved(qwen, tmp_path)
    assert program.main(words(tmp_path, "--compare", "accelerate")) == Exit.DEVICE
    assert "without --compare" in capsys.readouterr().err


def test_more_tokens_than_positions_are_a_usage_error(tmp_path):
    saved(gpt2, tmp_path)
    with pytest.raises(UsageError, match="has positions for 64"):
        placement_benchmark.build_checkpoint_model(read_folder(tmp_path), "float32", 65)


def test_a_model_of_pictures_is_refused_and_says_what_it_takes(tmp_path, capsys):
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    assert program.main(words(tmp_path)) == Exit.DEVICE
    assert "this model takes pixel_values" in capsys.readouterr().err


def test_a_config_whose_code_lies_beside_it_never_runs_that_code(tmp_path, capsys):
    saved(bert, tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    text = (tmp_path / "config.json").read_text().replace('"bert"', '"evil"')
    mapped = '{"auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"},'
    (tmp_path / "config.json").write_text(text.replace("{", mapped, 1))
    assert program.main(words(tmp_path)) == Exit.USAGE
    assert "transformers can't build this model" in capsys.readouterr().err
    assert not ran.exists()


@pytest.mark.parametrize(
    "senseless", [{"num_attention_heads": 5}, {"pad_token_id": 5000}, {"layer_norm_eps": "a"}]
)
def test_a_config_that_transformers_refuses_is_refused_in_its_words(senseless, tmp_path, capsys):
    saved(bert, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | senseless))
    assert program.main(words(tmp_path)) == Exit.USAGE
    assert "transformers can't build this model" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_names_what_does_not_fit(tmp_path, capsys):
    saved(bert, tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4')
    (tmp_path / "config.json").write_text(text)
    assert program.main(words(tmp_path)) == Exit.DEVICE
    assert "doesn't fit the model" in capsys.readouterr().err


def test_without_transformers_the_message_says_what_to_install(tmp_path, capsys, monkeypatch):
    saved(bert, tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert program.main(words(tmp_path)) == Exit.DEVICE
    said = capsys.readouterr().err
    assert "needs transformers" in said
    assert "pip install transformers" in said
