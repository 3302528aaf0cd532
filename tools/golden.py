"""Golden outputs of a checkout, for before and after a change of its layout: values stay, keys change by a map of renames only.

    CHECKOUT/.venv/bin/python golden.py record CHECKOUT FILE.json      about 2 minutes of CPU, one process
    python3 golden.py compare BEFORE.json AFTER.json [RENAMES.json]    exit code 1 if anything differs

Recorded: `forebay plan --json` of 12 configurations, losses of 6 quickstart steps, bytes by placement of a tiny managed model with its
gradients' hash, the action lists of all pipeline schedules, and names of the command line. RENAMES maps old keys and strings to new
ones, such as {"half": "sublayer"}; it is applied to the old file's keys and values before they are compared.

Only the command line, `forebay.manage` and one import with two homes are used, so it runs before and after a move.
"""

import contextlib
import hashlib
import importlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

PLANS = [
    ["quickstart"],
    ["quickstart-gpu", "--device", "h100"],
    ["quickstart", "--set", "train.batch=16", "--set", "train.microbatch=2", "--pp", "2", "--set", "parallel.schedule=dualpipev"],
    ["quickstart", "--set", "train.batch=16", "--set", "train.microbatch=2", "--pp", "2", "--set", "parallel.schedule=zbv"],
    ["quickstart", "--set", "train.batch=16", "--set", "train.microbatch=1", "--pp", "2", "--set", "parallel.schedule=interleaved-1f1b"],
    ["quickstart", "--set", "train.batch=16", "--set", "train.microbatch=2", "--pp", "2", "--set", "parallel.schedule=1f1b", "--gpus", "4"],
    ["quickstart", "--set", "parallel.ep=2", "--gpus", "2", "--skew", "1.3"],
    ["quickstart-gpu", "--gpus", "2", "--budget", "20GiB"],
    ["quickstart-gpu", "--gpus", "2", "--budget", "6GiB", "--auto"],
    ["quickstart-gpu", "--budget", "3GiB", "--search", "microbatch"],
    ["qwen3-30b-a3b", "--gpus", "8", "--budget", "140GiB", "--set", "model.config={num_hidden_layers=4}"],
    ["quickstart-gpu", "--set", "memory.policy=auto", "--set", "memory.budget=8GiB"],
]


def run(cli, arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as error:
            code = error.code
    text = out.getvalue()
    try:
        answer = json.loads(text)
    except ValueError:
        answer = text.splitlines()
    return {"code": code, "out": answer, "err": err.getvalue().splitlines()}


def first(*names):
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ModuleNotFoundError(names)


def record(checkout: Path) -> dict:
    sys.path.insert(0, str(checkout / "src"))
    import torch

    torch.set_num_threads(1)
    import forebay
    from forebay import cli

    assert Path(forebay.__file__).is_relative_to(checkout.resolve()), forebay.__file__
    found: dict = {"public": sorted(forebay.__all__)}
    found["plans"] = {" ".join(p): run(cli, ["plan", *p, "--json"]) for p in PLANS}

    with tempfile.TemporaryDirectory() as folder:
        sets = {
            "train.steps": 6, "train.batch": 4, "train.microbatch": 2, "train.sequence": 64, "schedule.warmup": 2, "train.eval_every": 3,
            "checkpoint.every": 3, "log.folder": f"{folder}/run", "log.progress": "off", "data.source": "text",
            "data.path": f"{folder}/text.txt", "data.cache": f"{folder}/cache",
        }
        Path(folder, "text.txt").write_text("".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(400)))
        arguments = [x for k, v in sets.items() for x in ("--set", f"{k}={v}")]
        code = run(cli, ["train", "quickstart", *arguments])["code"]
        run_folder = next(Path(folder, "run").rglob("metrics.jsonl"), None)
        keep = lambda r: {k: v for k, v in r.items() if not any(w in k for w in ("second", "time", "speed", "per_s", "peak", "reserved"))}
        rows = [keep(json.loads(line)) for line in run_folder.read_text().splitlines()] if run_folder else None
        found["quickstart"] = {"code": code, "metrics": rows}
        result = next(Path(folder, "run").rglob("result.json"), None)
        found["quickstart_result"] = json.loads(result.read_text()) if result else None
        profile = next(Path(folder, "run").rglob("profile.json"), None)
        found["quickstart_profile"] = json.loads(profile.read_text()) if profile else None
        run_json = next(Path(folder, "run").rglob("run.json"), None)
        found["run_config"] = (
            sorted(x for x in flat(json.loads(run_json.read_text()).get("config", {})) if folder not in x) if run_json else None
        )
        if run_folder:
            page = Path(folder, "page.html")
            found["report_code"] = run(cli, ["report", str(run_folder.parent), "--out", str(page)])["code"]
            found["report_written"] = page.exists()

    found["placements"] = {}
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
    )
    for policy in ("keep", "offload", "recompute", {"*.self_attn": "offload", "*.mlp": "recompute", "*": "keep"}):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
        with forebay.manage(model, policy if isinstance(policy, dict) else {"*": policy} if policy == "keep" else {"*.self_attn": policy, "*.mlp": policy}) as managed:
            ids = torch.arange(48).view(2, 24) % 64
            for _ in range(3):
                model.zero_grad()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            step = managed.report()
            figures = {k: v for k, v in vars_of(step).items() if "byte" in k or "placement" in k}
        grads = hashlib.sha256(b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None)).hexdigest()
        found["placements"][str(policy)] = {"loss": loss.item(), "gradients": grads, "report": plain(figures)}

    schedule = importlib.import_module("forebay.pipeline.schedule")
    partition = importlib.import_module("forebay.pipeline.partition")
    found["actions"] = {}
    for name in ("1f1b", "interleaved-1f1b", "zbv", "dualpipev"):
        for pp, microbatches in ((2, 4), (2, 8), (4, 8)):
            plan = schedule.make_plan(name, pp, microbatches)
            found["actions"][f"{name} {pp} {microbatches}"] = [[plain_action(a) for a in rank] for rank in plan.actions]
    costs = [partition.LayerCost(1.0 + i % 3, 2.0 + i % 5) for i in range(24)]
    for name in ("1f1b", "interleaved-1f1b", "zbv", "dualpipev"):
        found["actions"][f"partition {name}"] = plain(partition.partition_layers(costs, name, 4, microbatches=8, embedding=costs[0], head=costs[1]).layers)
    return found


def vars_of(x):
    return {f: getattr(x, f) for f in dir(x) if not f.startswith("_") and not callable(getattr(x, f))}


def plain_action(a):
    return repr(tuple(a)) if isinstance(a, tuple) else repr(a).split("(", 1)[1]


def plain(x):
    if isinstance(x, dict) or hasattr(x, "items"):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple, set, frozenset, range)):
        return [plain(v) for v in x]
    return x if isinstance(x, (int, float, str, bool, type(None))) else repr(x)


def flat(x, at=""):
    if isinstance(x, dict):
        for k, v in x.items():
            yield from flat(v, f"{at}.{k}")
    elif isinstance(x, list):
        for i, v in enumerate(x):
            yield from flat(v, f"{at}[{i}]")
    else:
        yield f"{at} = {x!r}"


def compare(before: dict, after: dict, renames: dict) -> int:
    def renamed(x):
        if isinstance(x, dict):
            return {renames.get(k, k): renamed(v) for k, v in x.items()}
        if isinstance(x, list):
            return [renamed(v) for v in x]
        return renames.get(x, x) if isinstance(x, str) else x

    a, b = set(flat(renamed(before))), set(flat(after))
    ignore = ("seconds", "elapsed")
    a, b = ({x for x in s if not x.startswith(ignore)} for s in (a, b))
    for x in sorted(a - b)[:60]:
        print("-", x[:300])
    for x in sorted(b - a)[:60]:
        print("+", x[:300])
    print(f"{len(a & b)} equal, {len(a - b)} only before, {len(b - a)} only after")
    return int(a != b)


if __name__ == "__main__":
    if sys.argv[1] == "record":
        begun = time.process_time()
        found = record(Path(sys.argv[2]).resolve())
        Path(sys.argv[3]).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{len(set(flat(found)))} values, {time.process_time() - begun:.0f} s of CPU")
    else:
        sys.exit(compare(*(json.loads(Path(f).read_text()) for f in sys.argv[2:4]), json.loads(Path(sys.argv[4]).read_text()) if len(sys.argv) > 4 else {}))
