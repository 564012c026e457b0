from collections import Counter
def test_count(fake_device):
    for shape in ("llama-3-8b", "qwen3-4b", "opt-1.3b"):
        for what in ("train", "decode"):
            r = []
            for layers in (1, 2):
                if what == "train":
                    x = fake_device.run("fakecuda.programs:train", shape=shape, layers=layers, rows=2)
                    x = x[0] if isinstance(x, (list, tuple)) else x
                    r.append((x["launches"], Counter(x["operations"])))
                else:
                    x = fake_device.run("fakecuda.programs:decode", shape=shape, layers=layers, new_tokens=8, length=64)[0]
                    r.append((x["graph_operations"][0], Counter(x["graph_kinds"])))
            print("\n", shape, what, r[1][0] - r[0][0], dict((r[1][1] - r[0][1]).most_common(40)))
