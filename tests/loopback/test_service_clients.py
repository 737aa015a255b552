"""Clients that others wrote, with their own defaults, against the service over real sockets."""

import base64
import subprocess
from collections.abc import Iterator

import numpy as np
import openai
import pytest
import tritonclient.http as triton
from test_service_sockets import Served, served
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    with served() as made:
        yield made


@pytest.fixture
def client(here: Served) -> Iterator[triton.InferenceServerClient]:
    made = triton.InferenceServerClient(f"127.0.0.1:{here.port}")
    yield made
    made.close()


def texts(*values: str) -> triton.InferInput:
    data = np.array([value.encode() for value in values], dtype=np.object_)
    made = triton.InferInput("text", [len(values)], "BYTES")
    made.set_data_from_numpy(data)  # binary, by default
    return made


def test_tritonclient_with_its_defaults_sends_and_gets_binary_tensors(
    client: triton.InferenceServerClient,
) -> None:
    answer = client.infer("finbert", [texts("Profits rose.", "Müller fiel.")], request_id="7")
    assert answer.get_response()["id"] == "7"
    assert answer.as_numpy("label").tolist() == [b"yes", b"yes"]
    assert answer.as_numpy("probabilities").tolist() == [[1.0, 0.0]] * 2
    assert "data" not in answer.get_output("probabilities")


def test_tritonclient_asks_for_json_and_for_one_output(client: triton.InferenceServerClient) -> None:
    wanted = [triton.InferRequestedOutput("label", binary_data=False)]
    answer = client.infer("finbert", [texts("a")], outputs=wanted, model_version="1")
    assert answer.get_output("label")["data"] == ["yes"]
    assert answer.as_numpy("probabilities") is None


def test_tritonclient_sends_token_ids_with_mask_and_types(client: triton.InferenceServerClient) -> None:
    inputs = []
    for name, rows in (
        ("input_ids", [[101, 7, 102, 8, 102], [101, 9, 102, 0, 0]]),
        ("attention_mask", [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        ("token_type_ids", [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]),
    ):
        made = triton.InferInput(name, [2, 5], "INT64")
        made.set_data_from_numpy(np.array(rows, dtype=np.int64))
        inputs.append(made)
    assert client.infer("finbert", inputs).as_numpy("label").tolist() == [b"yes", b"yes"]


def test_tritonclient_sends_pairs(client: triton.InferenceServerClient) -> None:
    second = triton.InferInput("text_pair", [1], "BYTES")
    second.set_data_from_numpy(np.array([b"b"], dtype=np.object_), binary_data=False)
    assert client.infer("finbert", [texts("a"), second]).as_numpy("label").tolist() == [b"yes"]


def test_tritonclient_sees_health_models_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("finbert")
    assert client.get_server_metadata()["name"] == "weir"
    assert client.get_model_metadata("finbert")["outputs"][0]["name"] == "label"
    (model,) = client.get_model_repository_index()
    assert (model["name"], model["state"]) == ("finbert", "READY")
    with pytest.raises(InferenceServerException, match="model_control"):
        client.unload_model("finbert")


def test_tritonclients_timeout_is_a_deadline(here: Served, client: triton.InferenceServerClient) -> None:
    here.fake.gate.clear()
    try:
        with pytest.raises(InferenceServerException, match="deadline"):
            client.infer("finbert", [texts("a")], timeout=50_000)
    finally:
        here.fake.gate.set()


@pytest.mark.parametrize("encoding", ["base64", "float", None])
def test_openais_client_gets_embeddings(here: Served, encoding: str | None) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{here.port}/v1", api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["finbert"]
        more = {} if encoding is None else {"encoding_format": encoding}  # its own default is base64
        answer = client.embeddings.create(model="finbert", input=["a", "b"], **more)  # type: ignore[call-overload]
    assert [each.index for each in answer.data] == [0, 1]
    vector = answer.data[0].embedding
    if encoding == "base64":
        vector = np.frombuffer(base64.b64decode(vector), dtype=np.float32)
    assert vector == pytest.approx([0.6, 0.8])
    assert answer.usage.total_tokens == 4


def test_openais_client_understands_a_refusal(here: Served) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{here.port}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            client.embeddings.create(model="gpt", input="a")
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="finbert", input="a", dimensions=3)


def test_curl_with_the_documented_line_is_answered(here: Served) -> None:
    done = subprocess.run(
        [
            "curl",
            "-sf",
            f"http://127.0.0.1:{here.port}/predict",
            "-d",
            '{"texts": ["Profits rose."]}',
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"label":"yes"' in done.stdout
