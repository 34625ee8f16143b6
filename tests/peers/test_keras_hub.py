"""Backbones of keras_hub, with random weights and the layouts of ``rx.experimental.layouts.for_model``: the numbers of one
device, and an even part of the state on each."""

import keras
import keras_hub
import numpy as np
import pytest

import loaded_models
import replicax as rx

TOKENS, LENGTH = 64, 8
BACKBONES = {
    "gpt2": lambda: keras_hub.models.GPT2Backbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        intermediate_dim=128,
        max_sequence_length=2 * LENGTH,
    ),
    "llama": lambda: keras_hub.models.LlamaBackbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
    ),
    "gemma": lambda: keras_hub.models.GemmaBackbone(  # whose single key head stays whole
        vocabulary_size=TOKENS,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=32,
        intermediate_dim=256,
        head_dim=8,
    ),
}
OTHERS = {
    "mistral": (keras_hub.models.MistralBackbone, {"num_query_heads": 4, "num_key_value_heads": 2}),
    "qwen": (keras_hub.models.QwenBackbone, {"num_query_heads": 4, "num_key_value_heads": 2}),
    "bert": (keras_hub.models.BertBackbone, {"num_heads": 4, "max_sequence_length": LENGTH}),
    "gpt_neo_x": (keras_hub.models.GPTNeoXBackbone, {"num_heads": 4, "max_sequence_length": LENGTH}),
}


def trained(strategy, make_backbone):
    """Returns the model and the losses of two batches, the second of which is smaller."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        backbone = make_backbone()
        model = keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-3), loss)
    ids = np.random.default_rng(0).integers(0, TOKENS, (21, LENGTH + 1)).astype(np.int32)
    inputs = {"token_ids": ids[:, :-1], "padding_mask": np.ones((21, LENGTH), np.int32)}
    return model, model.fit(inputs, ids[:, 1:], batch_size=12, shuffle=False, verbose=0).history["loss"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BACKBONES)
def test_training_equals_one_device_and_each_device_holds_an_even_part(name):
    _, expected = trained(rx.MirroredStrategy(["cpu:0"]), BACKBONES[name])
    layout_map = rx.experimental.layouts.for_model(BACKBONES[name], devices_per_replica=2)
    strategy = rx.MirroredStrategy(devices_per_replica=2, layout_map=layout_map, shard_state="all")
    model, losses = trained(strategy, BACKBONES[name])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    variables = [*model.variables, *model.optimizer.variables]
    held = sum(variable.value.addressable_shards[0].data.nbytes for variable in variables)
    even = sum(variable.value.nbytes for variable in variables) / len(strategy.topology.devices)
    assert held <= 1.06 * even


@pytest.mark.parametrize("name", OTHERS)
def test_attention_feed_forward_and_embeddings_of_others_are_sharded(name):
    make, heads = OTHERS[name]
    backbone = make(vocabulary_size=TOKENS, num_layers=1, hidden_dim=32, intermediate_dim=64, **heads)
    layout_map = rx.experimental.layouts.for_model(backbone, devices_per_replica=2)
    whole = [variable for variable in backbone.variables if not layout_map[variable.path]]
    matrices = {variable.path for variable in whole if len(variable.shape) > 1}
    known = ("position_embedding/", "segment_embedding/", "pooled_dense/")  # small ones
    assert not {path for path in matrices if not path.startswith(known)}


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
@pytest.mark.timeout(240)
def test_each_process_loads_a_preset_in_its_shards_and_some_variables(tmp_path):
    for num_layers in (1, 8):
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=768,
            num_layers=num_layers,
            num_heads=4,
            hidden_dim=768,
            intermediate_dim=768,
            max_sequence_length=LENGTH,
        )
        backbone.save_to_preset(tmp_path / str(num_layers))
    values = [np.asarray(variable.value) for variable in backbone.weights]
    small, large = ((tmp_path / str(n), n, 768) for n in (1, 8))
    loaded_models.check("preset", small, large, values)
