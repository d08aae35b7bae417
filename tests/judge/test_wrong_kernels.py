"""Each model's check tells plausible wrong kernels from right ones. All of them are plain PyTorch.

The right ones and a few others take the whole path of a user's file; the rest are checked by the same code in one process.
"""

import textwrap

import pytest
from judged import judged, one_worker

from playground import catalog
from playground.driver.runner import Options, Runner, Task
from playground.report.progress import Progress

HEADER = """
import torch
import torch.nn as nn
import torch.nn.functional as F
"""

CONV_POOL_SIGMOID_SUM = """
class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.avg_pool = nn.AvgPool2d(pool_kernel_size)
        self.pool = pool_kernel_size
        self.kept = None

    def tail(self, y):
        return torch.sigmoid(self.avg_pool(y)).sum(dim=(1, 2, 3))

    def forward(self, x):
        weight, bias = self.conv.weight, self.conv.bias
"""

CONV3D_DIV_MAX_GAP_BIAS_SUM = """
class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor = divisor
        self.max_pool = nn.MaxPool3d(pool_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.kept = None

    def tail(self, y):
        return torch.sum(self.max_pool(y / self.divisor).mean((2, 3, 4), keepdim=True) + self.bias, dim=1)

    def forward(self, x):
        weight, bias, divisor = self.conv.weight, self.conv.bias, self.divisor
"""

ALEXNET_CONV1 = """
class ModelNew(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 96, 11, stride=4, padding=2)
        self.kept = None

    def conv(self, x, weight, bias):
        return F.conv2d(x, weight, bias, stride=4, padding=2)

    def forward(self, x):
        weight, bias = self.conv1.weight, self.conv1.bias
"""

RIGHT = {
    "conv_pool_sigmoid_sum": {
        "as_the_original": "return self.tail(self.conv(x))",
        "pooled_before_the_weights": """
            pooled = F.avg_pool2d(x, self.pool, stride=1)
            return torch.sigmoid(F.conv2d(pooled, weight, bias, stride=self.pool)).sum((1, 2, 3))""",
    },
    "conv3d_div_max_gap_bias_sum": {
        "as_the_original": "return self.tail(self.conv(x))",
        "divided_at_the_end": """
            pooled = self.max_pool(self.conv(x)).mean((2, 3, 4), keepdim=True)
            return torch.sum(pooled / divisor + self.bias, dim=1)""",
    },
    "alexnet_conv1": {
        "as_the_original": "return self.conv1(x)",
        "channel_by_channel": """
            parts = [self.conv(x[:, c : c + 1], weight[:, c : c + 1], None) for c in range(3)]
            return sum(parts) + bias[:, None, None]""",
    },
}

WRONG = {
    "conv_pool_sigmoid_sum": {
        "constant": "return torch.full((x.shape[0],), 64 * 9 * 9 * 0.5) + 0 * (x.sum() + weight.sum() + bias.sum())",
        "only_the_bias": "return (81 * torch.sigmoid(bias).sum()).expand(x.shape[0]) + 0 * (x.sum() + weight.sum())",
        "no_bias": "return self.tail(F.conv2d(x, weight) + 0 * bias.sum())",
        "bias_twice": "return self.tail(F.conv2d(x, weight, 2 * bias))",
        "weights_flipped": "return self.tail(F.conv2d(x, weight.flip(2, 3), bias))",
        "weights_transposed": "return self.tail(F.conv2d(x, weight.transpose(2, 3), bias))",
        "input_channels_rotated": "return self.tail(F.conv2d(x, weight.roll(1, 1), bias))",
        "one_input_channel_missing": "return self.tail(F.conv2d(x[:, :-1], weight[:, :-1], bias))",
        "one_output_channel_missing": "return self.tail(self.conv(x)[:, :-1])",
        "convolution_padded": "return self.tail(F.conv2d(x, weight, bias, padding=1))",
        "sigmoid_before_pooling": "return self.avg_pool(torch.sigmoid(self.conv(x))).sum((1, 2, 3))",
        "maximum_for_average": "return torch.sigmoid(F.max_pool2d(self.conv(x), self.pool)).sum((1, 2, 3))",
        "sum_for_average": "return torch.sigmoid(self.pool**2 * self.avg_pool(self.conv(x))).sum((1, 2, 3))",
        "mean_for_sum": "return torch.sigmoid(self.avg_pool(self.conv(x))).mean((1, 2, 3))",
        "window_off_by_one": "return self.tail(self.conv(x)[:, :, 1:, 1:])",
        "last_row_of_windows_missing": "return torch.sigmoid(self.avg_pool(self.conv(x))[:, :, :-1]).sum((1, 2, 3))",
        "incomplete_windows_too": "return torch.sigmoid(F.avg_pool2d(self.conv(x), self.pool, ceil_mode=True)).sum((1, 2, 3))",
        "sigmoid_by_its_tangent": "return (0.5 + self.avg_pool(self.conv(x)) / 4).sum((1, 2, 3))",
        "half_precision": "return self.tail(F.conv2d(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).float())",
        "neighbour_sample": "return self.tail(self.conv(x)).roll(1)",
        "first_sample_for_all": "return self.tail(self.conv(x[:1])).expand(x.shape[0])",
        "bias_without_gradient": "return self.tail(F.conv2d(x, weight, bias.detach()))",
    },
    "conv3d_div_max_gap_bias_sum": {
        "constant": "return self.bias.sum().expand(x.shape[0], 1, 1, 1) + 0 * (x.sum() + weight.sum() + bias.sum())",
        "no_bias_of_the_convolution": "return self.tail(F.conv3d(x, weight) + 0 * bias.sum())",
        "bias_of_the_convolution_twice": "return self.tail(F.conv3d(x, weight, 2 * bias))",
        "no_bias": "return self.tail(self.conv(x)) - self.bias.sum()",
        "bias_twice": "return self.tail(self.conv(x)) + self.bias.sum()",
        "weights_flipped": "return self.tail(F.conv3d(x, weight.flip(2, 3, 4), bias))",
        "weights_transposed": "return self.tail(F.conv3d(x, weight.transpose(3, 4), bias))",
        "depth_and_height_swapped": "return self.tail(F.conv3d(x, weight.transpose(2, 3), bias))",
        "input_channels_rotated": "return self.tail(F.conv3d(x, weight.roll(1, 1), bias))",
        "one_input_channel_missing": "return self.tail(F.conv3d(x[:, :-1], weight[:, :-1], bias))",
        "not_divided": "return self.tail(divisor * self.conv(x))",
        "divided_twice": "return self.tail(self.conv(x) / divisor)",
        "multiplied_by_the_divisor": "return self.tail(divisor**2 * self.conv(x))",
        "bias_divided_too": "return self.tail(self.conv(x)) + (1 / divisor - 1) * self.bias.sum()",
        "average_for_maximum": """
            y = F.avg_pool3d(self.conv(x) / divisor, self.max_pool.kernel_size).mean((2, 3, 4), keepdim=True)
            return torch.sum(y + self.bias, dim=1)""",
        "minimum_for_maximum": "return 2 * self.bias.sum() - self.tail(-self.conv(x))",
        "maximum_starts_at_zero": "return self.tail(torch.relu(self.conv(x)))",
        "maximum_for_global_average": """
            y = self.max_pool(self.conv(x) / divisor).amax((2, 3, 4), keepdim=True)
            return torch.sum(y + self.bias, dim=1)""",
        "mean_for_sum": "return self.tail(self.conv(x)) / weight.shape[0]",
        "window_off_by_one": "return self.tail(self.conv(x)[:, :, 1:, 1:, 1:])",
        "last_column_of_windows_missing": "return self.tail(self.conv(x)[..., :-3])",
        "average_over_incomplete_windows": """
            y = F.max_pool3d(self.conv(x) / divisor, self.max_pool.kernel_size, ceil_mode=True)
            return torch.sum(y.mean((2, 3, 4), keepdim=True) + self.bias, dim=1)""",
        "half_precision": "return self.tail(F.conv3d(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).float())",
        "neighbour_sample": "return self.tail(self.conv(x)).roll(1, 0)",
        "first_sample_for_all": "return self.tail(self.conv(x[:1])).expand(x.shape[0], 1, 1, 1)",
        "gradient_of_an_average": """
            y = self.conv(x)
            smooth = torch.sum(F.avg_pool3d(y / divisor, self.max_pool.kernel_size).mean((2, 3, 4), keepdim=True), dim=1)
            return self.tail(y).detach() + smooth - smooth.detach() + self.bias.sum() - self.bias.sum().detach()""",
    },
    "alexnet_conv1": {
        "constant": "return bias[:, None, None] + 0 * self.conv1(x)",
        "no_bias": "return self.conv(x, weight, None) + 0 * bias.sum()",
        "bias_twice": "return self.conv(x, weight, 2 * bias)",
        "weights_flipped": "return self.conv(x, weight.flip(2, 3), bias)",
        "weights_transposed": "return self.conv(x, weight.transpose(2, 3), bias)",
        "blue_for_red": "return self.conv(x.flip(1), weight, bias)",
        "one_input_channel_missing": "return self.conv(x[:, :-1], weight[:, :-1], bias)",
        "output_channels_rotated": "return self.conv1(x).roll(1, 1)",
        "last_row_of_weights_missing": "return self.conv(x, F.pad(weight[:, :, :-1], (0, 0, 0, 1)), bias)",
        "padding_off_by_one": "return F.conv2d(F.pad(x, (1, 3, 1, 3)), weight, bias, stride=4)",
        "padded_with_the_border": "return F.conv2d(F.pad(x, (2, 2, 2, 2), mode='replicate'), weight, bias, stride=4)",
        "padding_on_one_side_only": "return F.conv2d(F.pad(x, (4, 0, 4, 0)), weight, bias, stride=4)",
        "stride_3": "return F.conv2d(x, weight, bias, stride=3, padding=2)",
        "stride_3_cut_to_size": """
            expected = self.conv1(x).shape
            return F.conv2d(x, weight, bias, stride=3, padding=2)[:, :, : expected[2], : expected[3]]""",
        "last_column_missing": "return F.pad(self.conv1(x)[..., :-1], (0, 1))",
        "activation_added": "return torch.relu(self.conv1(x))",
        "half_precision": "return self.conv(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).float()",
        "neighbour_sample": "return self.conv1(x).roll(1, 0)",
        "first_sample_for_all": "return self.conv1(x[:1]).expand(x.shape[0], -1, -1, -1)",
        "gradient_of_the_weights_only": "return self.conv(x.detach(), weight, bias)",
    },
}

TEMPLATES = {
    "conv_pool_sigmoid_sum": CONV_POOL_SIGMOID_SUM,
    "conv3d_div_max_gap_bias_sum": CONV3D_DIV_MAX_GAP_BIAS_SUM,
    "alexnet_conv1": ALEXNET_CONV1,
}
for name, forwards in WRONG.items():
    right = RIGHT[name]["as_the_original"].removeprefix("return ")
    forwards["output_of_the_first_call"] = f"self.kept = {right} if self.kept is None else self.kept\nreturn self.kept"


WHOLE_PATH = ["no_bias", "output_of_the_first_call"]
OPTIONS = Options(quick=True, time_limit=60)


def written(write_variant, name, forwards):
    """A variant for each forward's body."""
    return [
        write_variant(f"{name}_{title}", HEADER + TEMPLATES[name] + textwrap.indent(textwrap.dedent(body), " " * 8))
        for title, body in forwards.items()
    ]


@pytest.fixture(scope="module", params=WRONG)
def model(request):
    return request.param


@pytest.fixture(scope="module")
def run(model, write_variant):
    """{title: result} of one run of the right ones and of WHOLE_PATH, at the emulator's size."""
    forwards = RIGHT[model] | {title: WRONG[model][title] for title in WHOLE_PATH}
    original, sizes = catalog.find_model(model), catalog.SETTINGS["emulator"][model]
    tasks = [Task(original, variant, "cpu", sizes) for variant in written(write_variant, model, forwards)]
    with Progress() as progress:
        results = Runner(OPTIONS, progress).run(tasks)
    return dict(zip(forwards, results, strict=True))


@pytest.fixture(scope="module")
def checked(model, write_variant):
    """{title: result} of the check of all of WRONG."""
    files = [variant.path for variant in written(write_variant, model, WRONG[model])]
    with one_worker() as worker:
        results = judged(worker, catalog.find_model(model).path, files, catalog.SETTINGS["emulator"][model])
    return dict(zip(WRONG[model], results, strict=True))


def test_every_wrong_one_is_rejected(checked):
    passed = {title: result["reason"] for title, result in checked.items() if result["verdict"] != "fail"}
    assert not passed


def test_the_reason_is_one_line(checked):
    for result in checked.values():
        assert result["reason"] and "\n" not in result["reason"]


@pytest.mark.full
@pytest.mark.parametrize("title", WHOLE_PATH)
def test_a_wrong_one_is_rejected_and_not_timed(run, title):
    assert run[title]["verdict"] == "fail"
    assert "of its spread" in run[title]["reason"]
    assert run[title]["time_ms"] is None


@pytest.mark.full
@pytest.mark.parametrize("route", [0, 1])
def test_a_right_one_passes_by_either_route(run, route):
    result = list(run.values())[route]
    assert (result["verdict"], result["reason"]) == ("pass", None)
    assert all(gradient["complaint"] is None for gradient in result["check"]["gradients"].values())
    assert result["time_ms"]["median"] > 0
