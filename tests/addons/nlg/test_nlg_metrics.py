import math
from itertools import combinations, zip_longest

import pytest
from sacrebleu.metrics import TER

from dschat_lora.addons.nlg import metrics, ter
from dschat_lora.addons.nlg.evaluate import chosen_metrics
from dschat_lora.addons.nlg.metrics import treebank_tokens

METRICS = chosen_metrics("e2e")
CAT = "the cat sat on the mat"
SENTENCES = [
    "the old mill serves cheap french food near the river .",
    "a pub called blue spice , for families , is in the centre !",
    "there is no place like the golden curry by the bakery today",
]


@pytest.mark.parametrize(
    ("name", "best"), [("BLEU", 100), ("ROUGE-L", 100), ("CIDEr", 10), ("TER", 0), ("chrF", 100)]
)
def test_texts_equal_to_a_reference_score_best(name, best):
    references = [[text] for text in SENTENCES]
    score = METRICS[name](SENTENCES, references)
    assert score.value == pytest.approx(best)


@pytest.mark.parametrize("name", list(METRICS))
def test_numbers_of_references_may_differ(name):
    more = [[SENTENCES[0], "x y z"], [SENTENCES[1]], [SENTENCES[2], SENTENCES[0], "z"]]
    metric = METRICS[name]
    fewer = [["x y z"], [SENTENCES[1]], ["z"]]
    better, worse = metric(SENTENCES, more).value, metric(SENTENCES, fewer).value
    assert better < worse if name == "TER" else better > worse


def test_bleu_by_hand():
    # the x2, cat, on, mat, of 6; the-cat, on-the, the-mat of 5; on-the-mat of 4: no 4-gram yet.
    text = "the cat is on the mat"
    assert metrics.bleu([text], [[CAT]]).value == 0
    # With a second reference: 6/6, 5/5, 4/4 and 3/3 but for what spans neither: is-on and
    # cat-is come from it, the-cat-is and is-on-the too, and so the-cat-is-on, is-on-the-mat not.
    expected = 100 * (6 / 6 * 5 / 5 * 3 / 4 * 1 / 3) ** 0.25
    assert metrics.bleu([text], [[CAT, "the cat is on a mat"]]).value == pytest.approx(expected)
    # 4 tokens against 5 (nearer than 9): all n-grams agree, brevity penalty exp(1 - 5/4).
    references = [["the cat sat down here", "the cat sat down and was there all day"]]
    value = metrics.bleu(["The Cat sat down"], references).value
    assert value == pytest.approx(100 * math.exp(1 - 5 / 4))
    assert metrics.bleu(["A b, c d."], [["a b , c d ."]]).value == pytest.approx(100)


def test_ter_of_many_texts_is_that_of_all_at_once():
    words = "a b c d e f g".split()
    hypotheses = [" ".join(words[: 1 + i % 7]) for i in range(120)]
    references = [[" ".join(words[i % 3 :]), "x y"][: 1 + i % 2] for i in range(120)]
    streams = [list(stream) for stream in zip_longest(*references)]
    whole = TER(normalized=True)
    score = ter.ter(hypotheses, references)
    assert score.value == pytest.approx(whole.corpus_score(hypotheses, streams).score, rel=1e-12)
    assert score.signature == str(whole.get_signature())


def test_ter_by_hand():
    # One substitution and one deletion to the nearer reference; mean length (5 + 7) / 2.
    value = ter.ter(["a b x d e f"], [["a b c d e", "p q r s t u v"]]).value
    assert value == pytest.approx(100 * 2 / 6)
    # A group of words that moved is one edit.
    assert ter.ter(["c d a b e"], [["a b c d e"]]).value == pytest.approx(100 * 1 / 5)


def test_chrf_by_hand():
    # Characters without spaces: abc against abd. 1-grams 2/3 both ways, 2-grams 1/2, 3-grams 0;
    # longer ones are in neither. F2 of equal precision and recall is that number.
    expected = 100 * (2 / 3 + 1 / 2 + 0) / 3
    assert metrics.chrf(["abc"], [["abd"]]).value == pytest.approx(expected)


def test_nist_by_hand():
    # References: a b a c, 4 tokens; a twice, b, c, ab, ba, ac once, and so on.
    # 1-grams of "a b c": info(a) = log2(4/2) = 1, info(b) = info(c) = log2(4/1) = 2: 5 / 3.
    # 2-grams: ab agrees, info = log2(2/1) = 1, bc does not: 1 / 2. 3-grams: abc does not.
    # Length 3 of 4: exp(-beta ln(3/4)^2) with beta = ln 2 / ln(1.5)^2.
    penalty = math.exp(-math.log(2) * (math.log(3 / 4) / math.log(3 / 2)) ** 2)
    expected = (5 / 3 + 1 / 2) * penalty
    assert metrics.nist(["a b c"], [["a b a c"]]).value == pytest.approx(expected)


def test_nist_takes_ngrams_of_all_references_and_their_mean_length():
    # Together 6 tokens: a 3 times, b twice, c once. "b c" takes b from one reference and c from
    # the other: log2(6/2) + log2(6/1), over 2; bc agrees with none. Length 2 of (4 + 2) / 2, which
    # is two thirds and costs half.
    expected = (math.log2(3) + math.log2(6)) / 2 * 0.5
    assert metrics.nist(["b c"], [["a b a b", "a c"]]).value == pytest.approx(expected)
    # An n-gram counts as often as one reference has it: b once, though it is in both references,
    # of 2: log2(4/2) / 2; bb agrees with none.
    assert metrics.nist(["b b"], [["b c", "b d"]]).value == pytest.approx(1 / 2)


def longest_by_trying_all(first, second):
    for size in range(len(first), 0, -1):
        for places in combinations(range(len(first)), size):
            rest = iter(second)
            if all(first[i] in rest for i in places):
                return size
    return 0


def test_rouge_l_takes_best_precision_and_best_recall_of_different_references():
    text, references = "a b c d", ["a x b y c z", "d b"]
    # Common subsequences 3 and 1: precisions 3/4 and 1/4, recalls 3/6 and 1/2.
    sizes = [longest_by_trying_all(text.split(), each.split()) for each in references]
    assert sizes == [3, 1]
    precision, recall = 3 / 4, 1 / 2
    expected = 100 * 2.44 * precision * recall / (recall + 1.44 * precision)
    value = metrics.rouge_l([text], [references]).value
    assert value == pytest.approx(expected)
    # The mean over texts; one without anything in common counts 0.
    both = metrics.rouge_l([text, "q"], [references, ["r s"]]).value
    assert both == pytest.approx(expected / 2)


def cider_of_definition(texts, references, n_max=4, sigma=6.0):
    """Dense vectors over the whole vocabulary, one n at a time."""

    def grams(text, n):
        words = text.split()
        return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]

    def pair(text, reference, n):
        vocabulary = {gram for t in (text, reference) for gram in grams(t, n)}
        own, other = [], []
        for gram in vocabulary:
            documents = sum(any(gram in grams(r, n) for r in rs) for rs in references)
            weight = math.log(len(texts)) - math.log(max(1, documents))
            own.append(grams(text, n).count(gram) * weight)
            other.append(grams(reference, n).count(gram) * weight)
        norms = math.sqrt(sum(x * x for x in own)) * math.sqrt(sum(x * x for x in other))
        product = sum(min(x, y) * y for x, y in zip(own, other, strict=True))
        difference = len(text.split()) - len(reference.split())
        return 10 * math.exp(-(difference**2) / (2 * sigma**2)) * (product / norms if norms else 0)

    return sum(
        pair(text, reference, n) / n_max / len(each) / len(texts)
        for text, each in zip(texts, references, strict=True)
        for reference in each
        for n in range(1, n_max + 1)
    )


def test_cider_agrees_with_its_definition_on_dense_vectors():
    texts = ["the cat sat sat on the mat", "a dog ran by", "the bird sang all day long"]
    references = [
        [CAT, "a cat is on the mat"],
        ["a dog ran by the house and the barn"],
        ["the bird sang", "all day long the bird sang", "a bird"],
    ]
    expected = cider_of_definition(texts, references)
    assert 1 < expected < 10
    assert metrics.cider(texts, references).value == pytest.approx(expected)


def test_meteor_of_nltk_by_hand(monkeypatch):
    monkeypatch.setattr(metrics.shutil, "which", lambda name: None)
    # Five words of six agree as they are (cats by its stem), in the chunks "the cat" and
    # "on the mat": P = R = 5/6, penalty 0.5 (2/5)^3.
    score = metrics.meteor(["the cats lay on the mat"], [[CAT, "nothing of it"]])
    assert score.value == pytest.approx(100 * 5 / 6 * (1 - 0.5 * (2 / 5) ** 3))
    assert score.signature.startswith("nltk ")


def test_treebank_tokens():
    for text, expected in {
        "It isn't Loch Fyne's food.": "it is n't loch fyne 's food",
        "a family-friendly pub, 5 out of 5, (cheap)!": (
            "a family-friendly pub 5 out of 5 ( cheap )"
        ),
        "prices: \u00a320-25 - really": "prices \u00a3 20-25 really",
        "Dr. J. Smith of the U.S. died at 3.5": "dr. j. smith of the u.s. died at 3.5",
        "not family - friendly .": "not family friendly",
    }.items():
        assert list(treebank_tokens(text)) == expected.split()


def test_signatures_say_what_was_computed():
    texts, references = SENTENCES, [[text] for text in SENTENCES]
    signatures = {name: metric(texts, references).signature for name, metric in METRICS.items()}
    assert "case:lc" in signatures["BLEU"]
    assert "tok:13a" in signatures["BLEU"]
    assert "smooth:none" in signatures["BLEU"]
    assert "norm:yes" in signatures["TER"]
    assert "nc:6|nw:0" in signatures["chrF"]


def test_meteor_keeps_punctuation_of_triples_alone(monkeypatch):
    monkeypatch.setattr(metrics.shutil, "which", lambda name: None)
    seen = []
    monkeypatch.setattr(metrics, "meteor_score", lambda refs, own, **_: seen.append(own) or 0.5)
    for profile in ("e2e", "webnlg", "dart"):
        assert list(chosen_metrics(profile, ["meteor"])) == ["METEOR (nltk)"]
        chosen_metrics(profile, ["meteor"])["METEOR (nltk)"](["it is , x ."], [["it"]])
    assert seen == [("it", "is", "x"), *[("it", "is", ",", "x", ".")] * 2]


def test_the_metrics_asked_for_are_computed_alone():
    assert list(chosen_metrics("webnlg", ["ter", "bleu"])) == ["BLEU", "TER"]
