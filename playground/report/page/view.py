"""What the page's template shows of a run: its words and rows, section by section."""

import json

from playground.report import roofline, speed_bars
from playground.report.document import date_of, is_stale
from playground.report.figures import TALLY, baseline_name, geometric_means, inputs_text, isolation, machine, size_note
from playground.report.page import suite, variant, verdicts
from playground.report.page.verdicts import Mark
from playground.report.text import one_line, significant, with_unit

PLACES = {"cuda": "GPU", "cpu": "CPU", "emulator": "emulator"}
NOWHERE = "nowhere"
MOST_SOURCE = 200_000  # characters; of longer sources in all, only the lines around findings are on the page


def page(document, known):
    """Everything the template needs. `known` are Files, in any order."""
    results, environment = document["results"], document["environment"]
    pairs = [(result, _files(result, known)) for result in results]
    files = {path for _, (_, path) in pairs if path and path.is_file()}
    with_source = sum(path.stat().st_size for path in files) <= MOST_SOURCE
    sections = [
        _model(f"model-{number}", name, [pair for pair in pairs if pair[0]["model"] == name], with_source)
        for number, name in enumerate(dict.fromkeys(result["model"] for result in results), 1)
    ]
    return {
        "machine": machine(environment),
        "device": one_line(environment.get("gpu") or environment.get("cpu") or "A machine without a GPU"),
        "remarks": list(_remarks(environment)),
        "date": date_of(environment).strftime("%-d %B %Y, %H:%M %Z"),
        "environment": json.dumps(environment, indent=1, ensure_ascii=False),
        "tally": _tally(results),
        "means": [
            f"{with_unit(mean, 'x')} on the {PLACES[place]}: the geometric mean, over {count} "
            f"model{'s' * (count > 1)}, of the best variant's speed-up over the best that PyTorch does"
            for place, (mean, count) in geometric_means(results).items()
        ],
        "emulated": any(result["ran_on"] == "emulator" for result in results),
        "rooflines": [] if document.get("suite") else list(_rooflines(results)),
        "models": sections,
        "ladders": [] if document.get("suite") else list(_ladders(sections)),
        "table": suite.shown(document, sections) or verdicts.shown(sections, PLACES),
        "is_suite": bool(document.get("suite")),
    }


def _ladders(sections):
    """Each model's ladder for the first screen: those on GPUs first."""
    groups = [(section, group) for section in sections for group in section["groups"]]
    for section, group in sorted(groups, key=lambda pair: [*PLACES.values(), NOWHERE].index(pair[1]["place"])):
        for picture in speed_bars.pictures(group["members"], brief=True):
            title = f"{section['name']} on the {group['place']}"
            svg = speed_bars.page_svg(picture, f"first-{group['id']}", title)
            yield {"svg": svg, "model": section, "place": group["place"], "inputs": group["inputs"]}


def _files(result, known):
    """(model's path, variant's path) by their names, or (None, None). Of several, the one whose content is the result's."""
    names = result["model"], result["variant"]
    named = [each for each in known if (each.names or (each.model.stem, each.variant.stem)) == names]
    same = [each for each in named if not is_stale(result, each.variant, each.model)]
    return next(((each.model, each.variant) for each in same + named), (None, None))


def _remarks(environment):
    if environment.get("joined"):
        yield one_line(environment["joined"])
    if line := isolation(environment):
        yield line
    if environment.get("complete") is False:
        yield "the run did not come to its end: this is what was finished"


def _tally(results):
    counts = {word: sum(result["verdict"] == word for result in results) for word in TALLY}
    return [Mark(verdicts.mark(word).state, f"{count} {TALLY[word]}") for word, count in counts.items() if count]


def _rooflines(results):
    """Yield each place with its charts, one for a model and size, and all points as rows."""
    for number, place in enumerate(dict.fromkeys(result["ran_on"] for result in results if result.get("ceilings"))):
        of_place = [result for result in results if result["ran_on"] == place]
        ceilings = next(result["ceilings"] for result in of_place if result.get("ceilings"))
        charts, rows = [], []
        for (model, inputs), points in roofline.points_of(of_place).items():
            title = f"{model}, {inputs}"
            if svg := roofline.chart(
                points, ceilings, f"roof-{number}-{len(charts)}", f"Roofline of {title} on {PLACES[place]}"
            ):
                charts.append({"title": title, "svg": svg})
                rows += [(title, *_point_cells(point)) for point in points]
        if charts:
            yield {"place": PLACES[place], "charts": charts, "rows": rows}


def _point_cells(point):
    work = point.work["bytes"] / 1e6, point.work["flops"] / 1e9
    return point.name, *map(significant, (*work, point.intensity, point.milliseconds, point.rate / 1e9))


def _model(identity, name, pairs, with_source):
    """The section of a model: a group for each place and size, then the variants."""
    model_file = next((files[0] for _, files in pairs if files[0]), None)
    variants, first = [], {}
    for number, (result, (model_path, path)) in enumerate(pairs, 1):
        stale = path is not None and is_stale(result, path, model_path)
        variants.append(variant.shown(f"{identity}-{number}", result, path, stale, first.get(path), with_source))
        if path:
            first.setdefault(path, variants[-1]["id"])
    groups = {}
    for (result, _), shown in zip(pairs, variants, strict=True):
        groups.setdefault((result["ran_on"], size_note(result)), []).append((result, shown))
    return {
        "id": identity,
        "name": name,
        "about": " ".join(variant.documentation(model_file).split("\n\n")[0].split()) if model_file else "",
        "groups": [_group(f"{identity}-at-{n}", name, *key, each) for n, (key, each) in enumerate(groups.items())],
        "variants": variants,
        "members": [{"result": result, "shown": shown} for (result, _), shown in zip(pairs, variants, strict=True)],
    }


def _group(identity, name, place, sizes, members):
    results = [result for result, _ in members]
    floor = next((result for result in results if result["floor_ms"]), None)
    pictures = enumerate(speed_bars.pictures(members))
    return {
        "id": identity,
        "place": PLACES.get(place, NOWHERE),
        "inputs": next(filter(None, map(inputs_text, results)), ""),
        "sizes": sizes,
        "floor": floor and f"{with_unit(floor['floor_ms'], ' ms')}, bound by {floor['floor_bound']}",
        "ladders": [
            {"title": each.title, "svg": speed_bars.page_svg(each, f"{identity}-{n}", f"{name}, {each.title}")}
            for n, each in pictures
        ],
        "members": members,
        "missing": sorted(
            {
                f"{baseline_name(name)} was not measured: {why}"
                for result in results
                for name, why in (result.get("baselines_unavailable") or {}).items()
            }
        ),
    }
