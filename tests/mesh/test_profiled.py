"""What a profiler of torch sees of a program on real ranks: its modules and collectives by name."""

import torch
from torch.func import functional_call, grad
from torch.profiler import profile

from fdtensor import Mesh, connect, cost, distribute, spmd
from fdtensor.programs.sources import sources


def profiled(folder):
    """Names and numbers of what was seen, those of the program, and whether results are alike."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    mesh = Mesh(all=4)
    comm = connect(mesh)

    def step(params, x):
        return grad(lambda p: functional_call(model, p, (x,)).square().mean())(params)

    with torch.no_grad():
        params = distribute(dict(model.named_parameters()), mesh.layout(), comm)
    x = distribute(torch.randn(8, 8), mesh.layout("all"), comm)
    step = spmd(step)
    before = step(params, x)
    with profile() as seen:
        during = step(params, x)
    same = all(torch.equal(before[k].local, during[k].local) for k in before)
    program, path = step.trace(params, x), f"{folder}/{comm.rank}.json"
    seen.export_chrome_trace(path)
    cost.timeline(program).save(path, beside=path)
    known = [
        f"{eqn.op.collective} {'backward of ' * s.is_backward}{s.module or s.line}"
        for eqn, s in zip(program.eqns, sources(program), strict=True)
        if eqn.is_collective
    ]
    return [e.key for e in seen.key_averages() for _ in range(e.count)], known, same


def test_a_profiler_sees_modules_and_collectives(pool4, tmp_path):
    for names, known, same in pool4.run(profiled, str(tmp_path)):
        assert same
        assert names.count("fdtensor step") == 1
        assert {"0", "1", "2", "backward of 2"} <= set(names)
        assert known
        for name in known:
            assert names.count(name) == known.count(name)
