"""SmolLM2-135M against transformers, where these packages are installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.repo.pages import ROOT


def test_smollm2(example, tmp_path, monkeypatch):
    """Logits and text as transformers computes them, and again after a round trip."""
    pytest.importorskip("gguf")
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    monkeypatch.syspath_prepend(str(ROOT))
    folder, again = tmp_path / "smollm2", tmp_path / "again"
    try:
        example("tools.smollm2").main(folder)
    except SystemExit as error:
        pytest.skip(str(error))
    huggingface, model = example("_llama.huggingface"), example("_llama.model")
    decoder = model.Llama(huggingface.shape_of(huggingface.read_config(folder)), "float32")
    texts = example("_llama.texts").Texts(folder, decoder.shape.vocab)
    ids = texts.encode("What is the capital of France?")
    params = huggingface.load(folder, decoder, lambda path: jnp.bfloat16)
    logits = jax.jit(decoder.logits)(params, jnp.array([ids]))
    generate = jax.jit(decoder.generate, static_argnums=2)
    tokens = generate(params, jnp.array([ids]), 12, jax.random.key(0))
    assert texts.decode(tokens[0, len(ids) :].tolist()) == "The capital of France is Paris."
    huggingface.save(again, folder, decoder, params)
    for saved in (folder, again):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        with torch.no_grad():
            wanted = theirs(torch.tensor([ids])).logits.numpy()
        assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()
    template = transformers.AutoTokenizer.from_pretrained(again).chat_template
    assert template == texts.tokenizer.chat_template
