"""Inverses, factorizations, eigenvalues and singular values train like PyTorch, and so do models made of them."""

import copy

import marks
import pytest
import torch
from torch import distributions, linalg, nn
from torch.nn.utils import parametrizations

import orttrainer
from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import OrtTrainerError
from orttrainer.export.rewrites import elimination, factorizations, spectra, triangles


def positive(w):
    return w @ w.mT + torch.eye(w.shape[-1])


def outer(w, x):
    """One matrix for each row of x."""
    return (x @ w).unsqueeze(-1) * (x @ w).unsqueeze(-2)


def of_vectors(values, vectors):
    """What depends on values and vectors, but not on the vectors' signs."""
    weights = torch.arange(1.0, vectors.shape[-1] + 1)
    return values.sin().sum() + (vectors.square() * weights).sin().sum()


def of_svd(U, S, Vh):
    return of_vectors(S, U[..., :3]) + of_vectors(S, Vh.mT[..., :3]) + ((U[:, :3] * S[:3]) @ Vh[:3]).cos().sum()


def gradient_norm(y, w):
    return torch.autograd.grad(y, w, create_graph=True)[0].square().sum()


try:
    torch.qr(torch.eye(2))
    old_qr = torch.qr
except RuntimeError:  # since torch 2.15
    old_qr = linalg.qr

FORMS = {
    "inv": lambda w, x: linalg.inv(w).diagonal(dim1=-2, dim2=-1).sum(),
    "inverse": lambda w, x: (x @ torch.inverse(w)).square().mean(),
    "solve-matrix": lambda w, x: linalg.solve(w, x.T).square().mean(),
    "solve-vector": lambda w, x: linalg.solve(w, x.sum(0)).square().mean(),
    "solve-right": lambda w, x: linalg.solve(w, x, left=False).square().mean(),
    "inv-ex": lambda w, x: linalg.inv_ex(w).inverse.sin().sum(),
    "solve-ex": lambda w, x: linalg.solve_ex(w, x.T).result.sin().sum(),
    "tensorinv": lambda w, x: linalg.tensorinv(w.reshape(2, 2, 4), ind=2).sin().sum(),
    "tensorsolve": lambda w, x: linalg.tensorsolve(w.reshape(2, 2, 4), x[:2, :2]).sin().sum(),
    "matrix-power": lambda w, x: sum(linalg.matrix_power(w / 4, n).sin().sum() for n in (5, 0, -2)),
    "slogdet": lambda w, x: linalg.slogdet(w)[1] + (x @ w).square().mean(),
    "slogdet-batch": lambda w, x: sum(p.sin().sum() for p in linalg.slogdet(outer(w, x) - w)),
    "slogdet-small": lambda w, x: linalg.slogdet(positive(w) * 1e-12)[1],
    "logdet": lambda w, x: torch.logdet(positive(w)) + (x @ w).square().mean(),
    "triangular": lambda w, x: linalg.solve_triangular(w, x.T, upper=False).sin().sum(),
    "triangular-unit-right": lambda w, x: linalg.solve_triangular(
        w / 3, x, upper=True, left=False, unitriangular=True
    ).sum(),
    "triangular-old": lambda w, x: torch.triangular_solve(x.T, w, transpose=True).solution.sin().sum(),
    "cholesky": lambda w, x: linalg.cholesky(positive(w)).sin().sum(),
    "cholesky-batch": lambda w, x: linalg.cholesky(outer(w, x) + torch.eye(4)).sin().sum(),
    "cholesky-of-rows": lambda w, x: linalg.cholesky((x @ w) @ (x @ w).mT + torch.eye(len(x)), upper=True).sin().sum(),
    "cholesky-ex": lambda w, x: linalg.cholesky_ex(positive(w), upper=True).L.sin().sum(),
    "cholesky-solve": lambda w, x: torch.cholesky_solve(x.T, linalg.cholesky(positive(w))).sin().sum(),
    "cholesky-inverse": lambda w, x: torch.cholesky_inverse(torch.cholesky(positive(w))).sin().sum(),
    "cholesky-solve-free": lambda w, x: torch.cholesky_solve(x.T, w).sin().sum() + w.tril(-1).sum(),
    "cholesky-solve-upper": lambda w, x: torch.cholesky_solve(x.T, torch.stack([w, w.T + 1]), upper=True).sin().sum(),
    "cholesky-inverse-free": lambda w, x: sum(torch.cholesky_inverse(w, upper).sin().sum() for upper in (False, True)),
    "cholesky-large": lambda w, x: linalg.cholesky(positive(w.repeat(16, 16) / 8)).sin().mean(),
    "slogdet-large": lambda w, x: sum(p.sin().sum() for p in linalg.slogdet(w.repeat(13, 13) + 9 * torch.eye(52))),
    "lu-large": lambda w, x: sum(p.sin().mean() for p in linalg.lu(w.repeat(13, 13).triu(-3) - 2 * torch.eye(52))),
    "lu": lambda w, x: sum(p.sin().sum() for p in linalg.lu(w)),
    "lu-wide": lambda w, x: sum(p.sin().sum() for p in linalg.lu(torch.cat([w, w.sin()], 1)[:3])),
    "lu-tall": lambda w, x: sum(p.sin().sum() for p in linalg.lu(torch.stack([w, w.flip(0), w.cos()])[..., :2])),
    "lu-of-rows": lambda w, x: sum(p.sin().sum() for p in linalg.lu(torch.cat([x @ w, x.exp()]))),
    "lu-of-columns": lambda w, x: sum(p.sin().sum() for p in linalg.lu((x @ w).T)),
    "lu-factor": lambda w, x: (linalg.lu_factor(w).LU.sin() * (linalg.lu_factor(w).pivots + w.sum())).sum(),
    "lu-factor-ex": lambda w, x: sum(p.sin().sum() for p in linalg.lu_factor_ex(w.repeat(2, 1)[:7])),
    "lu-solve": lambda w, x: linalg.lu_solve(*linalg.lu_factor(w.flip(0)), x.T).sin().sum(),
    "lu-solve-right": lambda w, x: linalg.lu_solve(*linalg.lu_factor(w.flip(0)), x, left=False, adjoint=True).sum(),
    "lu-solve-old": lambda w, x: torch.lu_solve(x.T, *linalg.lu_factor(torch.stack([w, w.roll(1, 0)]))).sin().sum(),
    "lu-unpack": lambda w, x: sum(p.sin().sum() for p in torch.lu_unpack(*linalg.lu_factor(w.flip(0)[:, :3]))),
    "lu-parts": lambda w, x: torch.lu_unpack(*linalg.lu_factor(w), unpack_pivots=False).U.sin().sum(),
    "lu-twice": lambda w, x: gradient_norm(linalg.lu(w).U.sin().sum(), w),
    "ormqr": lambda w, x: torch.ormqr(w[:, :2].sin(), w[0, :2].sigmoid(), x.T).sin().sum(),
    "ormqr-right": lambda w, x: torch.ormqr(w.sin(), w[0].sigmoid(), x, left=False, transpose=True).sin().sum(),
    "qr": lambda w, x: sum(p.sin().sum() for p in linalg.qr(w)),
    "qr-several": lambda w, x: sum(p.sin().sum() for p in linalg.qr(torch.stack([w, w.cos(), w.exp()]))),
    "qr-large": lambda w, x: sum(p.sin().mean() for p in linalg.qr(w.repeat(25, 13)[:, :50] + 9 * torch.eye(100, 50))),
    "qr-tall": lambda w, x: sum(p.sin().sum() for p in old_qr(x @ w)),
    "qr-wide": lambda w, x: sum(p.sin().sum() for p in linalg.qr(w[:3])),
    "householder": lambda w, x: linalg.householder_product(w, w.sum(0).sigmoid()).sin().sum(),
    "eigh": lambda w, x: of_vectors(*linalg.eigh(positive(w))),
    "eigh-batch": lambda w, x: 0.1 * of_vectors(*linalg.eigh(outer(w, x) + positive(w), UPLO="U")),
    "eigvalsh": lambda w, x: linalg.eigvalsh(w + w.mT).sin().sum(),
    "eigvalsh-equal": lambda w, x: linalg.eigvalsh(torch.eye(4) * w.sum()).sin().sum(),
    "svd": lambda w, x: of_svd(*linalg.svd(w)),
    "svd-tall": lambda w, x: of_svd(*linalg.svd(x @ w, full_matrices=False)),
    "svd-complete": lambda w, x: of_svd(*linalg.svd(w[:3])),
    "svd-old": lambda w, x: of_svd(*(p.mT if n == 2 else p for n, p in enumerate(torch.svd(w[:, :3])))),
    "svdvals-odd": lambda w, x: linalg.svdvals(w[:3, :3]).sin().sum(),
    "norms": lambda w, x: torch.norm(w, "nuc") + linalg.matrix_norm(x @ w, 2) + linalg.norm(w, -2, keepdim=True).sum(),
    "ranks": lambda w, x: (
        (x @ w).square().mean() * linalg.matrix_rank(torch.stack([w, w.tril(-1), 1e-3 * w, 0 * w]), atol=0.1).sum()
    ),
    "ranks of products": lambda w, x: (
        w.square().sum()
        * (
            linalg.matrix_rank(x @ w)
            - linalg.matrix_rank(outer(w, x), 2.0).sum()
            + linalg.matrix_rank(w[:, :1] @ w[:1])
        )
        + w.sin().sum() * linalg.matrix_rank(w + w.T, hermitian=True, rtol=0.4)
    ),
    "svd-of-few-rows": lambda w, x: of_svd(*linalg.svd(torch.cat([x @ w, x.sin(), x @ w.T], 1), full_matrices=False)),
    "from-few-rows-to-many": lambda w, x: (
        linalg.svdvals(torch.cat([x @ w, x[:, :2]], 1).T).sin().sum() + linalg.pinv((x @ w)[2:]).sum()
    ),
    "norm-of-zeros": lambda w, x: linalg.matrix_norm(w * 0, "nuc") + (x @ w).square().mean(),
    "pinv": lambda w, x: linalg.pinv(x @ w).sin().sum(),
    "pinv-wide": lambda w, x: torch.pinverse(w[:3]).sin().sum(),
    "pinv-of-lower-rank": lambda w, x: linalg.pinv(w[:, :2] @ w[:2], rtol=1e-3).sin().sum(),
    "pinv-hermitian": lambda w, x: linalg.pinv(positive(w), hermitian=True).sin().sum(),
    "lstsq": lambda w, x: linalg.lstsq(x @ w, x[:, :2]).solution.sin().sum(),
    "cond": lambda w, x: linalg.cond(w) + linalg.cond(w, -2),
    "cholesky-twice": lambda w, x: gradient_norm(linalg.cholesky(positive(w)).sin().sum(), w),
    "qr-twice": lambda w, x: gradient_norm(linalg.qr(w)[0].sin().sum(), w),
    "eigenvalues-twice": lambda w, x: 0.01 * gradient_norm(linalg.eigvalsh(positive(w)).sin().sum(), w),
    "singular-values-twice": lambda w, x: gradient_norm(linalg.svdvals(w).sin().sum(), w),
    "slogdet-twice": lambda w, x: gradient_norm(linalg.slogdet(w)[1], w),
}

if hasattr(linalg, "polar"):  # since torch 2.15
    FORMS |= {
        "sqrth": lambda w, x: linalg.matrix_sqrth(positive(w)).sin().sum(),
        "sqrth-of-a-triangle": lambda w, x: linalg.matrix_sqrth(positive(w.detach()) + w.tril() / 9)[1, :3].sin().sum(),
        "sqrth-equal": lambda w, x: (x @ linalg.matrix_sqrth(torch.eye(4) + w - w.detach())).sin().sum(),
        "sqrth-twice": lambda w, x: gradient_norm(linalg.matrix_sqrth(positive(w)).sin().sum(), w),
        "polar": lambda w, x: sum(p.sin().sum() for p in linalg.polar(w)),
        "polar-of-rows": lambda w, x: sum(p.sin().sum() for p in linalg.polar(x @ w)),
        "polar-batch": lambda w, x: 0.1 * sum(p[:, 1, :3].sin().sum() for p in linalg.polar(outer(w, x) + w)),
        "polar-equal": lambda w, x: sum((x @ p).sin().sum() for p in linalg.polar(2 * torch.eye(4) + w - w.detach())),
        "polar-twice": lambda w, x: gradient_norm(linalg.polar(w)[0].sin().sum(), w),
    }


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.randn(4, 4) + 3 * torch.eye(4))

    def forward(self, x):
        return self.form(self.weight, x)


class Orthogonal(nn.Module):
    def __init__(self):
        super().__init__()
        self.wider, self.square = (
            parametrizations.orthogonal(nn.Linear(4, 6)),
            parametrizations.orthogonal(nn.Linear(6, 6)),
        )
        self.narrower = parametrizations.orthogonal(nn.Linear(6, 3))

    def forward(self, x):
        return (self.narrower(self.square(self.wider(x).tanh()).tanh()) - 1).square().mean()


class GaussianProcess(nn.Module):
    """The marginal likelihood of the rows of a batch."""

    def __init__(self):
        super().__init__()
        self.length, self.noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def covariance(self, x):
        return torch.exp(-torch.cdist(x, x).square() / self.length.exp() ** 2) + self.noise.exp() * torch.eye(len(x))

    def forward(self, x):
        factor, y = linalg.cholesky(self.covariance(x)), x.sin().sum(-1, keepdim=True)
        return (y * torch.cholesky_solve(y, factor)).sum() / 2 + factor.diagonal().log().sum()


class GaussianProcessOfDistribution(GaussianProcess):
    def forward(self, x):
        y = distributions.MultivariateNormal(torch.zeros(len(x)), covariance_matrix=self.covariance(x))
        return -y.log_prob(x.sin().sum(-1))


class MixtureDensity(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.heads = nn.Linear(4, 8), nn.Linear(8, 3 * 6)

    def forward(self, x):
        logits, mean, scales, below = self.heads(self.hidden(x).tanh()).split([3, 6, 6, 3], -1)
        factor = torch.diag_embed(nn.functional.softplus(scales.reshape(-1, 3, 2)))
        factor = factor + nn.functional.pad(below.reshape(-1, 3, 1, 1), (0, 1, 1, 0))
        parts = distributions.MultivariateNormal(mean.reshape(-1, 3, 2), scale_tril=factor)
        mixture = distributions.MixtureSameFamily(distributions.Categorical(logits=logits), parts)
        prior = distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
        return distributions.kl_divergence(parts, prior).mean() - mixture.log_prob(x[:, :2]).mean()


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.mean = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        low = distributions.LowRankMultivariateNormal(self.mean, self.factor, torch.ones(4))
        full = distributions.MultivariateNormal(self.mean, covariance_matrix=positive(self.factor @ self.factor.mT))
        prior = distributions.MultivariateNormal(torch.zeros(4), torch.eye(4))
        return distributions.kl_divergence(full, prior) - low.log_prob(x).mean()


def assert_trains_alike(model):
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    description = ModelDescription(
        [IODescription("x", ["n", 4], torch.float32)], [IODescription("loss", [], torch.float32)]
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    trainer = ORTTrainer(model, None, description, "SGDOptimizer", None, rate, torch.device("cpu"))
    for step in range(3):
        x = torch.randn(5 + step, 4)
        loss, expected = trainer.train_step(x, torch.tensor([0.01])), twin(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-6)
    for own, expected in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


USUAL = [
    *(
        "inv",
        "solve-vector",
        "slogdet-small",
        "triangular-unit-right",
        "cholesky-batch",
        "cholesky-of-rows",
        "qr-several",
    ),
    *("qr-tall", "householder", "eigh-batch", "eigvalsh-equal", "svd-tall", "cholesky-twice", "eigenvalues-twice"),
    *(
        "lu-of-columns",
        "lu-solve",
        "cholesky-solve-upper",
        "sqrth-of-a-triangle",
        "sqrth-equal",
        "polar-of-rows",
        "polar-equal",
    ),
]


@pytest.mark.parametrize("name", marks.usual(FORMS, *USUAL))
def test_linear_algebra_trains_like_pytorch(name):
    torch.manual_seed(0)
    assert_trains_alike(Model(FORMS[name]))


class Correlations(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))

    def forward(self, x):
        found = torch.corrcoef(x * self.scale)
        return (found * (1 + found.detach().sigmoid())).mean()


def test_a_graph_that_computes_in_float32_what_is_float64_is_refused():
    model = Correlations()  # of one row, which TorchScript's exporter alone takes where there may be several
    trainer = orttrainer.trainer(model, lambda y, label: (y - label).sin(), torch.optim.SGD(model.parameters(), lr=0.1))
    for rows in (1, 2):
        trainer.step(torch.randn(rows, 2, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64))
    with pytest.raises(OrtTrainerError, match=r"torch\.float32 on the first batch, the module gives torch\.float64"):
        trainer.step(torch.randn(1, 3, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64))


MODELS = [Orthogonal, GaussianProcess, GaussianProcessOfDistribution, MixtureDensity, LowRank]


@pytest.mark.parametrize("model", marks.usual(MODELS, GaussianProcess, LowRank))
def test_models_of_linear_algebra_train_like_pytorch(model):
    torch.manual_seed(0)
    assert_trains_alike(model())


def graded(size):
    """Singular values from 1 to 1e-12."""
    U, _, V = linalg.svd(torch.randn(size, size, dtype=torch.float64))
    return (U * torch.logspace(0, -12, size, dtype=torch.float64)) @ V


def clustered(size):
    """Singular values from 1.1 to 1, ever closer together: 12 sweeps of rotations leave 3e-11."""
    U, _, V = linalg.svd(torch.randn(size, size, dtype=torch.float64))
    return (U * (1 + 0.1 * torch.logspace(0, -14, size, dtype=torch.float64))) @ V


MATRICES = {
    "1": lambda: torch.randn(1, 1, dtype=torch.float64),
    "2": lambda: torch.randn(2, 2, dtype=torch.float64),
    "tall, odd": lambda: torch.randn(9, 7, dtype=torch.float64),
    "wide": lambda: torch.randn(5, 8, dtype=torch.float64),
    "graded": lambda: graded(48),
    "clustered": lambda: clustered(48),
    "of rank 3": lambda: torch.randn(8, 3, dtype=torch.float64) @ torch.randn(3, 8, dtype=torch.float64),
    "zeros": lambda: torch.zeros(4, 4, dtype=torch.float64),
}


def test_factorizations_by_halves_are_lapack_s():
    torch.manual_seed(0)
    A = torch.randn(2, 101, 101, dtype=torch.float64)
    P, factors, U, free = elimination._eliminated(A)
    for found, expected in zip((P, P.mT @ factors, U), linalg.lu(A)):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert not free.any()
    for shape in ((101, 101), (130, 70), (60, 101)):
        B = torch.randn(2, *shape, dtype=torch.float64)
        for found, expected in zip(factorizations.orthonormal(B), linalg.qr(B)):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    L = linalg.cholesky(positive(A))
    torch.testing.assert_close(factorizations._lower_factor(positive(A)), L, rtol=1e-11, atol=1e-11)
    for upper in (False, True):
        T = L.mT if upper else L
        found = triangles.inverse_of_triangle(T + (A.tril(-1) if upper else A.triu(1)), upper)
        torch.testing.assert_close(found @ T, torch.eye(101).to(T).expand_as(T), rtol=0, atol=1e-10)


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_rotations_find_singular_values_and_eigenvalues_to_float64_s_roundings(matrix):
    torch.manual_seed(0)
    A = matrix()
    U, S, V = spectra._singular(A)
    torch.testing.assert_close(S, linalg.svdvals(A), rtol=0, atol=1e-13)
    torch.testing.assert_close((U * S) @ V.mT, A, rtol=0, atol=1e-13)
    for x in (U, V):
        torch.testing.assert_close(x.mT @ x, torch.eye(len(S), dtype=torch.float64), rtol=0, atol=1e-13)
    square = A.mT @ A - torch.eye(A.shape[1])
    values, vectors = spectra._Eigh.apply(square, "L")
    torch.testing.assert_close(values, linalg.eigvalsh(square), rtol=0, atol=1e-12)
    torch.testing.assert_close((vectors * values) @ vectors.mT, square, rtol=0, atol=1e-12)
