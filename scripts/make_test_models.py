#!/usr/bin/env python3
"""Makes the small random models of crates/models/tests/fixtures and their reference outputs.

Needs transformers, sentence-transformers and torch. The outputs are checked in; run this only to
add a model or an input. Every model is random but seeded, and its weights are spread far wider than
a fresh initialisation, so that a wrong sign, order or bias shows in the numbers.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 32, 2, 4, 56, 72
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Retrieval finds the passages that answer a question.",
    "A cross-encoder reads the question and the passage together.",
    "Vectors of equal length can be compared by their angle.",
    "Zürich, São Paulo and Kraków are cities; 東京 is one as well.",
    "Numbers such as 3.14159, 42 and 1,000,000 occur in texts.",
] * 4
INPUTS = [
    "The quick brown fox jumps over the lazy dog.",
    "fox",
    "",
    " ",
    "Zürich ﬁne naïve Ωmega 東京タワー \u200b\u0301 🦀🦀 a\u0000b ＡＢＣ",
    "UPPER lower MiXeD",
    "a question about vectors " * 20,
    "word\tword\nword\r\nword",
    "x" * 300,
    "Numbers such as 3.14159 occur.",
]
PAIRS = [
    ("which animal jumps?", "The quick brown fox jumps over the lazy dog."),
    ("which animal jumps?", "Numbers such as 3.14159 occur in texts."),
    ("", ""),
    ("question", ""),
    ("short", "a long passage about vectors and angles " * 20),
    ("a long question about vectors and angles " * 20, "a long passage about vectors and angles " * 20),
    ("東京?", "Zürich 🦀"),
]


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=220, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    # What some repositories leave in the file, and what must not count.
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9, pad_id=0, pad_token="[PAD]")
    names = dict(unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]", cls_token="[CLS]", mask_token="[MASK]")
    return tokenizer, names


def bytelevel():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer, roberta_names()


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=220, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer, roberta_names()


def roberta_names():
    return dict(
        bos_token="<s>", eos_token="</s>", sep_token="</s>", cls_token="<s>", unk_token="<unk>",
        pad_token="<pad>", mask_token="<mask>",
    )


COMMON = dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=INNER, hidden_size=HIDDEN)
ARCHITECTURES = {
    "bert": ("Bert", wordpiece, dict(max_position_embeddings=POSITIONS, pad_token_id=0, **COMMON)),
    "roberta": ("Roberta", bytelevel, dict(max_position_embeddings=POSITIONS, type_vocab_size=1, pad_token_id=1, **COMMON)),
    "xlm-roberta": ("XLMRoberta", unigram, dict(max_position_embeddings=POSITIONS, type_vocab_size=1, pad_token_id=1, **COMMON)),
    "distilbert": ("DistilBert", wordpiece, dict(
        max_position_embeddings=POSITIONS, pad_token_id=0, n_layers=LAYERS, n_heads=HEADS, hidden_dim=INNER, dim=HIDDEN)),
    "mpnet": ("MPNet", wordpiece, dict(max_position_embeddings=POSITIONS, pad_token_id=1, **COMMON)),
}
# An encoder that counts positions like RoBERTa and tells texts apart by type like BERT.
TYPED = "xlm-roberta-typed"
ARCHITECTURES_OF_HEADS = ARCHITECTURES | {
    TYPED: ("XLMRoberta", wordpiece, dict(
        max_position_embeddings=POSITIONS, type_vocab_size=2, pad_token_id=1, **COMMON)),
}


def randomise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "LayerNorm.weight" in name or "layer_norm.weight" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * (1.4 / parameter.shape[-1] ** 0.5 if "embeddings" not in name else 0.7))


def save_base(directory, architecture, seed, head=None, extra=None, dtype=torch.float32, **save):
    """Writes model and tokenizer as transformers does."""
    family, tokenizer, settings = ARCHITECTURES_OF_HEADS[architecture]
    backend, names = tokenizer()
    settings = dict(settings, vocab_size=backend.get_vocab_size(), **(extra or {}))
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}{head or 'Model'}")(config)
    randomise(model, seed)
    model.to(dtype).save_pretrained(directory, **save)
    backend.save(str(Path(directory) / "tokenizer.json"))
    limit = POSITIONS - (2 if "roberta" in architecture or architecture == "mpnet" else 0)
    kind = "PreTrainedTokenizerFast"
    inputs = ["input_ids", "attention_mask"] + (["token_type_ids"] if architecture in ("bert", TYPED) else [])
    write_json(Path(directory) / "tokenizer_config.json", dict(
        names, tokenizer_class=kind, model_max_length=limit, model_input_names=inputs))


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def modules(*types):
    named = {"Transformer": "", "Pooling": "1_Pooling"}
    return [
        dict(idx=i, name=str(i), path=named.get(t, f"{i}_{t}"), type=f"sentence_transformers.models.{t}")
        for i, t in enumerate(types)
    ]


def pooling(*modes, **other):
    keys = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    return dict({f"pooling_mode_{k}": k in modes for k in keys}, word_embedding_dimension=HIDDEN, **other)


LAYOUT = {
    "modules.json": modules("Transformer", "Pooling", "Normalize"),
    "1_Pooling/config.json": pooling("mean_tokens"),
    "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": False},
}
PLAIN = {
    "modules.json": modules("Transformer", "Pooling"),
    "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": False},
}


def variants():
    """Name, base directory, files put over it, and inputs by role."""
    for base in ARCHITECTURES:
        yield base, base, {}, "encode"
    for kind in ["f16", "bf16", "sharded", "gelu-new"]:
        yield f"bert-{kind}", f"bert-{kind}", {}, "encode"
    for mode in ["cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]:
        yield f"pooling-{mode}", "bert", dict(PLAIN, **{"1_Pooling/config.json": pooling(mode)}), "encode"
    yield "pooling-several", "roberta", dict(
        PLAIN, **{"1_Pooling/config.json": pooling("cls_token", "max_tokens", "mean_tokens", "lasttoken")}), "encode"
    yield "pooling-new-style", "bert", dict(PLAIN, **{"1_Pooling/config.json": {
        "embedding_dimension": HIDDEN, "pooling_mode": ["mean", "cls"], "include_prompt": True}}), "encode"
    yield "lower-case", "xlm-roberta", {
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True}}, "encode"
    yield "no-modules", "mpnet", {name: None for name in LAYOUT}, "encode"
    dense = dict(in_features=HIDDEN, out_features=24, bias=True, activation_function="torch.nn.modules.activation.Tanh")
    yield "dense", "bert-dense", {
        "modules.json": modules("Transformer", "Pooling", "Dense", "Normalize"), "2_Dense/config.json": dense}, "encode"
    yield "layer-norm", "bert-dense", {
        "modules.json": modules("Transformer", "Pooling", "Dense", "LayerNorm"), "2_Dense/config.json": dense,
        "3_LayerNorm/config.json": {"dimension": 24}}, "encode"
    # Other names of the same file, which older models have; the first that says anything counts.
    yield "sentence-config-legacy", "roberta", {
        "sentence_bert_config.json": None,
        "sentence_roberta_config.json": {"max_seq_length": 12, "do_lower_case": True}}, "encode"
    yield "sentence-config-order", "bert", {
        "sentence_bert_config.json": {},
        "sentence_xlm-roberta_config.json": {"max_seq_length": 30, "do_lower_case": False},
        "sentence_distilbert_config.json": {"max_seq_length": 9, "do_lower_case": False}}, "encode"
    prompts = {"prompts": {"query": "query: ", "passage": "passage of text: "}, "default_prompt_name": None}
    for role in ["query", "passage"]:
        yield f"prompt-{role}", "bert", {"config_sentence_transformers.json": prompts}, role
        yield f"prompt-{role}-left-out", "bert", {
            "config_sentence_transformers.json": prompts,
            "1_Pooling/config.json": pooling("mean_tokens", include_prompt=False)}, role
    yield "prompt-default", "bert", {"config_sentence_transformers.json": {
        "prompts": {"all": "every text: "}, "default_prompt_name": "all"}}, "encode"


def overlay(base, files, target):
    shutil.copytree(base, target, dirs_exist_ok=True)
    for name, content in files.items():
        path = Path(target) / name
        if content is None:
            shutil.rmtree(path.parent) if "/" in name else path.unlink()
        else:
            write_json(path, content)


def numbers(tensor):
    return [[float(f"{value:.7g}") for value in row] for row in tensor.tolist()]


def embed(directory, role):
    model = SentenceTransformer(str(directory), device="cpu", model_kwargs={"dtype": torch.float32})
    prompt = {"encode": None, "query": "query: ", "passage": "passage of text: "}[role]
    # One at a time: a batch would be padded, and the reference should not depend on its neighbours.
    return [numbers(model.encode([text], prompt=prompt, convert_to_tensor=True))[0] for text in INPUTS]


def score(directory):
    model = CrossEncoder(str(directory), device="cpu")
    return [float(f"{model.predict([pair])[0]:.7g}") for pair in PAIRS]


DEFAULT_MODEL_TEXTS = [
    "How do I reset my password?",
    "The quick brown fox jumps over the lazy dog.",
    "",
    "Zürich naïve 東京タワー 🦀",
    "x" * 200,
    "A cross-encoder reads the question and the passage together. " * 60,
]


def default_model(directory, target):
    """Reference vectors of the real default model, whose files are not checked in."""
    model = SentenceTransformer(directory, device="cpu")
    vectors = [[float(f"{x:.6g}") for x in model.encode([text])[0].tolist()] for text in DEFAULT_MODEL_TEXTS]
    target.write_text(json.dumps(dict(texts=DEFAULT_MODEL_TEXTS, vectors=vectors), ensure_ascii=False))


def main(root, default_directory):
    transformers.logging.set_verbosity_error()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    default_model(default_directory, root / "all-minilm-l6-v2.json")
    for number, name in enumerate(ARCHITECTURES):
        save_base(root / name, name, seed=number)
    save_base(root / "bert-f16", "bert", seed=20, dtype=torch.float16)
    save_base(root / "bert-bf16", "bert", seed=21, dtype=torch.bfloat16)
    save_base(root / "bert-sharded", "bert", seed=22, dtype=torch.float16, max_shard_size="20KB")
    save_base(root / "bert-gelu-new", "bert", seed=23, extra=dict(hidden_act="gelu_new"), dtype=torch.float16)
    save_base(root / "bert-dense", "bert", seed=24, dtype=torch.float16)
    generator = torch.Generator().manual_seed(25)
    (root / "bert-dense" / "2_Dense").mkdir()
    save_file(
        {"linear.weight": torch.randn(24, HIDDEN, generator=generator) * 0.3,
         "linear.bias": torch.randn(24, generator=generator) * 0.3},
        root / "bert-dense" / "2_Dense" / "model.safetensors",
    )
    generator = torch.Generator().manual_seed(26)
    (root / "bert-dense" / "3_LayerNorm").mkdir()
    save_file(
        {"norm.weight": 1 + torch.randn(24, generator=generator) * 0.3,
         "norm.bias": torch.randn(24, generator=generator) * 0.3},
        root / "bert-dense" / "3_LayerNorm" / "model.safetensors",
    )
    for directory in sorted(path for path in root.iterdir() if path.is_dir()):
        for name, content in LAYOUT.items():
            write_json(directory / name, content)

    heads = {
        "cross-bert": ("bert", dict(num_labels=1)),
        "cross-roberta": ("roberta", dict(num_labels=1)),
        "cross-xlm-roberta": ("xlm-roberta", dict(num_labels=1)),
        "cross-bert-identity": ("bert", dict(
            num_labels=1, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})),
        "cross-roberta-old": ("roberta", dict(
            num_labels=1, sbert_ce_default_activation_function="torch.nn.modules.activation.Tanh")),
        "cross-two-labels": ("bert", dict(num_labels=2)),
        "cross-xlm-roberta-typed": (TYPED, dict(num_labels=1)),
        "cross-distilbert": ("distilbert", dict(num_labels=1)),
        "cross-mpnet": ("mpnet", dict(num_labels=1)),
    }
    for number, (name, (architecture, extra)) in enumerate(heads.items()):
        dtype = torch.float32 if number < 3 else torch.float16
        save_base(root / name, architecture, 40 + number, "ForSequenceClassification", extra, dtype)

    references = dict(inputs=INPUTS, pairs=PAIRS, embeddings=[], scores=[])
    for name, base, files, role in variants():
        with tempfile.TemporaryDirectory() as target:
            overlay(root / base, files, target)
            vectors = embed(target, role)
        references["embeddings"].append(dict(name=name, base=base, files=files, role=role, vectors=vectors))
        print(name, len(vectors[0]))
    for name in heads:
        if name != "cross-two-labels":
            with tempfile.TemporaryDirectory() as target:
                overlay(root / name, {}, target)
                if number >= 3:
                    state = {k: v.float() for k, v in load_file(f"{target}/model.safetensors").items()}
                    save_file(state, f"{target}/model.safetensors", {"format": "pt"})
                    config = json.loads(Path(f"{target}/config.json").read_text())
                    write_json(Path(target) / "config.json", dict(config, dtype="float32"))
                references["scores"].append(dict(base=name, scores=score(target)))
            print(name, references["scores"][-1]["scores"])
    (root / "references.json").write_text(json.dumps(references, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY_OF_ALL_MINILM_L6_V2")
    main(Path(__file__).parent.parent / "crates/models/tests/fixtures", sys.argv[1])
