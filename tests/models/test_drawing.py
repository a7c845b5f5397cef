"""What models of pictures and sound are shown: positions by name, classes, and every family through the same door."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from sinklab.corpora import resolve_corpus
from sinklab.errors import InputError, UnsupportedModelError
from sinklab.models.drawing import default_corpus, draw_samples, reading_part
from sinklab.models.loading import load_model, wrap_model
from sinklab.models.losses import IGNORED, class_targets
from sinklab.probes.entropy import Entropy
from sinklab.probes.score_gap import ScoreGap
from sinklab.sinks import find_sinks
from sinklab.studies.measure.probing import check_identity, run_probes

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
VISION = {**SIZES, "image_size": 64, "patch_size": 8}
SOUND = {**SIZES, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 12}
TOWERS = {"text_config": {**SIZES, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}}
TOWERS |= {"vision_config": VISION}
WHISPER = {"vocab_size": 60, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2}
WHISPER |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8}
WHISPER |= {"max_source_positions": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SPECTRUM = {**SIZES, "max_length": 64, "num_mel_bins": 32}
WINDOWS = {"image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
CORNERS = [f"corner patch ({row}, {column})" for row in (0, 7) for column in (0, 7)]
REGISTERS = [f"register {number}" for number in range(4)]


def build(model_class, config, processor=None):
    torch.manual_seed(0)
    cls = getattr(transformers, model_class)
    config = getattr(transformers, config[0])(**config[1])
    size = {"height": 64, "width": 64}
    return wrap_model(cls(config), processor=processor or ViTImageProcessorPil(size=size), name=model_class)


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    config = ViTConfig(**VISION, id2label={0: "tabby, cat", 1: "red dog", 2: "7"}, attn_implementation="eager")
    return wrap_model(ViTForImageClassification(config), processor=ViTImageProcessorPil(size={"height": 64, "width": 64}))


@pytest.mark.parametrize(
    ("model_class", "config", "front"),
    [
        ("ViTModel", ("ViTConfig", VISION), ["[CLS]"]),
        ("DeiTForImageClassificationWithTeacher", ("DeiTConfig", VISION), ["[CLS]", "[DIST]"]),
        ("Dinov2Model", ("Dinov2Config", VISION), ["[CLS]"]),
        ("Dinov2WithRegistersModel", ("Dinov2WithRegistersConfig", VISION | {"num_register_tokens": 4}), ["[CLS]", *REGISTERS]),
        ("DINOv3ViTModel", ("DINOv3ViTConfig", VISION | {"num_register_tokens": 4}), ["[CLS]", *REGISTERS]),
        ("BeitForImageClassification", ("BeitConfig", VISION), ["[CLS]"]),
        ("CLIPVisionModel", ("CLIPVisionConfig", VISION), ["[CLS]"]),
        ("CLIPModel", ("CLIPConfig", TOWERS), ["[CLS]"]),
        ("SiglipModel", ("SiglipConfig", TOWERS), []),
    ],
)
def test_positions_of_a_picture_are_called_what_they_are(model_class, config, front):
    loaded = reading_part(build(model_class, config))
    corpus = default_corpus(loaded)
    samples = draw_samples(loaded, corpus, seq_len=3, samples=2, seed=0, bos=False)
    assert corpus.name == "photographs"
    assert (samples.kind, samples.grid, samples.targets) == ("image", (8, 8), None)
    assert list(samples.names[: len(front)]) == front
    assert samples.names[len(front) + 9] == "patch (1, 1)"
    assert [name for name in samples.names if name.startswith("corner")] == CORNERS
    together = {"the corner patches": tuple(len(front) + place for place in (0, 7, 56, 63))}
    assert samples.together == (together | {"the registers": (1, 2, 3, 4)} if REGISTERS[0] in front else together)
    assert check_identity(loaded.model, samples)["tokens_of_identity_check"] == len(front) + 64
    assert samples.pictures.shape == (2, 64, 64, 3)


def test_positions_in_windows_are_said_to_be_in_windows():
    loaded = build("SwinForImageClassification", ("SwinConfig", WINDOWS))
    samples = draw_samples(loaded, resolve_corpus("noise"), seq_len=3, samples=2, seed=0, bos=False)
    assert (samples.grid, samples.positions, samples.together) == (None, 16, {})
    assert samples.names[5] == "place (1, 1) of a window"


@pytest.mark.parametrize(
    ("model_class", "config", "processor", "positions", "name"),
    [
        ("Wav2Vec2Model", ("Wav2Vec2Config", SOUND), ("Wav2Vec2FeatureExtractor", {}), 12, "frame 5"),
        ("HubertForSequenceClassification", ("HubertConfig", SOUND), ("Wav2Vec2FeatureExtractor", {}), 12, "frame 5"),
        (
            "ASTModel",
            ("ASTConfig", SPECTRUM),
            ("ASTFeatureExtractor", {"max_length": 64, "num_mel_bins": 32}),
            12,
            "patch (0, 3)",
        ),
        (
            "WhisperForConditionalGeneration",
            ("WhisperConfig", WHISPER),
            ("WhisperFeatureExtractor", {"feature_size": 8, "chunk_length": 1}),
            50,
            "frame 5",
        ),
    ],
)
def test_positions_of_sound_are_frames(model_class, config, processor, positions, name):
    made = getattr(transformers, processor[0])(**processor[1])
    loaded = reading_part(build(model_class, config, made))
    corpus = default_corpus(loaded)
    assert corpus.name == "chirps"
    samples = draw_samples(loaded, corpus, seq_len=12, samples=2, seed=0, bos=False)
    assert (samples.kind, samples.positions, samples.names[5]) == ("audio", positions, name)
    assert check_identity(loaded.model, samples)["tokens_of_identity_check"] == positions


def test_what_is_to_be_seen_is_what_the_model_sees(classifier, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    samples = draw_samples(classifier, resolve_corpus(str(tmp_path)), seq_len=3, samples=1, seed=0, bos=False)
    assert (samples.pictures[0].numpy() == pixels).all()
    assert samples.arguments["pixel_values"][0].permute(1, 2, 0).numpy() == pytest.approx(pixels / 127.5 - 1, abs=1e-6)


def test_classes_are_names_or_numbers(classifier):
    labels = ["tabby, cat", "CAT", "Red_Dog", "1", 1, "7", None, "tabby"]
    assert class_targets(classifier.model, labels, "x").tolist() == [0, 0, 1, 1, 1, 2, IGNORED, 0]
    assert class_targets(classifier.model, [None, None], "x") is None
    message = r"corpus 'x': label 'cow' is none of the model's 3 classes \(tabby, cat, red dog, 7\); a class is"
    with pytest.raises(InputError, match=message):
        class_targets(classifier.model, ["cow"], "x")


def test_the_loss_is_that_of_the_labelled_pictures(classifier, tmp_path):
    for name in ("cat/a.png", "red dog/b.png", "c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 80), (len(name), 9, 200)).save(tmp_path / name)
    samples = draw_samples(classifier, resolve_corpus(str(tmp_path)), seq_len=3, samples=3, seed=0, bos=False)
    assert sorted(samples.targets.tolist()) == [IGNORED, 0, 1]
    with torch.no_grad():
        logits = classifier.model(**samples.arguments).logits
    expected = torch.nn.functional.cross_entropy(logits, samples.targets, ignore_index=IGNORED).item()
    assert run_probes(classifier.model, samples, [], loss=True).loss == pytest.approx(expected, rel=1e-6)


def test_positions_of_one_role_are_a_sink_together(classifier):
    samples = draw_samples(classifier, resolve_corpus("noise"), seq_len=3, samples=24, seed=0, bos=False)
    model, threshold = classifier.model, 0.06  # four of 65 positions have 0.0615 of attention that looks everywhere alike
    with torch.no_grad():
        weights = torch.stack(model(**samples.arguments, output_attentions=True).attentions).double()
    corners = list(samples.together["the corner patches"])
    share = weights[..., corners].sum(-1)
    hits = share.mean(-1) > threshold
    assert 0 < hits.double().mean() < 1 or hits.all()
    found = find_sinks(model, samples.arguments, threshold=threshold, names=samples.names, together=samples.together)
    (sink,) = found.sinks
    assert (sink.kind, sink.name, sink.positions) == ("group", "the corner patches", tuple(corners))
    assert sink.rate == pytest.approx(100 * hits.double().mean().item())
    assert sink.mass == pytest.approx(share.mean().item(), rel=1e-5)
    others = [query for query in range(65) if query not in corners]
    # float32 scores of a few units have errors of some 1e-6; the weights inherit them.
    assert found.weights == pytest.approx(share[..., others].mean((1, 3)).flatten().numpy(), rel=1e-4)
    seen = run_probes(model, samples, [Entropy().about(found), ScoreGap().about(found)])
    table = seen.session.table().query("layer.notna()")
    rest = weights.clone()
    rest[..., corners] = 0
    rest = rest / rest.sum(-1, keepdim=True)
    entropy = -torch.xlogy(rest, rest).sum(-1)
    joint = torch.logit(share).mean((1, 3)).flatten()
    for metric, expected in {
        "entropy_without_sink": entropy.mean((1, 3)).flatten(),
        "sink_column_weight": share.mean((1, 3)).flatten(),
        "gap_to_rest_lse": joint,
    }.items():
        values = table[table["metric"] == metric].sort_values(["layer", "head"])["value"]
        assert values.to_numpy(float) == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-5), metric


def test_one_of_a_group_alone_is_that_position(classifier):
    samples = draw_samples(classifier, resolve_corpus("noise"), seq_len=3, samples=4, seed=0, bos=False)
    # All attention at position 1: the group of four accounts for no more sinks than this one of it.
    names = samples.names
    pulled = dict(samples.arguments)
    model = build("ViTModel", ("ViTConfig", VISION)).model
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear) and layer.in_features == layer.out_features == 16:
                layer.weight.zero_()
        found = find_sinks(model, pulled, threshold=0.012, names=names, together={"the pair": (1, 2)})
    assert {sink.kind for sink in found.sinks} == {"position"}


def test_models_and_corpora_that_do_not_go_together(classifier, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("words and words\n" * 9)
    cases = [
        (str(text), r"ViTForImageClassification reads pictures, and corpus 'notes.txt' holds text; give a folder of pictures"),
        ("chirps", r"reads pictures, and corpus 'chirps' holds recordings; give a folder of pictures, or photographs"),
    ]
    for corpus, message in cases:
        with pytest.raises(InputError, match=message):
            draw_samples(classifier, resolve_corpus(corpus), seq_len=9, samples=1, seed=0, bos=False)
    softmax = load_model("embedded:softmax")
    with pytest.raises(
        InputError, match=r"SinkLM reads text, and corpus 'photographs' holds pictures; give a text file, a folder"
    ):
        draw_samples(softmax, resolve_corpus("photographs"), seq_len=9, samples=1, seed=0, bos=False)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"'a.png' holds 1 pictures, and 5 samples are wanted; give `samples` 1 or less"):
        draw_samples(classifier, resolve_corpus(str(tmp_path / "a.png")), seq_len=9, samples=5, seed=0, bos=False)
    video = build("VideoMAEModel", ("VideoMAEConfig", VISION | {"num_frames": 4}))
    with pytest.raises(UnsupportedModelError, match="VideoMAEModel reads videos, and corpora hold pictures"):
        draw_samples(video, resolve_corpus("noise"), seq_len=9, samples=1, seed=0, bos=False)


def test_a_processor_that_is_missing_or_wrong(classifier, tmp_path):
    classifier.model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    with pytest.raises(InputError, match=r"has no preprocessor_config.json, which says how the model's pictures are made into"):
        draw_samples(loaded, resolve_corpus("noise"), seq_len=9, samples=1, seed=0, bos=False)
    with pytest.raises(InputError, match=r"came without a processor, .*; give it: sinklab.wrap_model\(model, processor=...\)"):
        draw_samples(wrap_model(classifier.model), resolve_corpus("noise"), seq_len=9, samples=1, seed=0, bos=False)
    classifier.processor.save_pretrained(tmp_path)
    assert isinstance(load_model(str(tmp_path)).processor, type(AutoImageProcessor.from_pretrained(tmp_path)))
    (tmp_path / "preprocessor_config.json").write_text("{")
    (tmp_path / "processor_config.json").unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"the processor of .* cannot be loaded"):
        load_model(str(tmp_path))
