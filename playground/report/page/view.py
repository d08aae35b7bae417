"""What the page's template shows of a run: its words and rows, section by section."""

import json

from playground.report import figures, roofline, speed_bars
from playground.report.document import date_of, is_stale
from playground.report.page import suite, variant, verdicts
from playground.report.text import one_line, with_unit

PLACES = {"cuda": "GPU", "cpu": "CPU", "emulator": "emulator"}
NOWHERE = "nowhere"
INCOMPLETE = "the run did not come to its end: this is what was finished"
MOST_SOURCE = 200_000  # characters; of longer sources in all, only the lines around findings are on the page


def page(document, known):
    """Return everything the template needs. `known` are Files, in any order."""
    results, environment, is_suite = document["results"], document["environment"], bool(document.get("suite"))
    pairs = [(result, *_files(result, known)) for result in results]
    files = {path for *_, path in pairs if path and path.is_file()}
    with_source = sum(path.stat().st_size for path in files) <= MOST_SOURCE
    sections = [
        _model(f"model-{number}", name, [pair for pair in pairs if pair[0]["model"] == name], with_source)
        for number, name in enumerate(dict.fromkeys(result["model"] for result in results), 1)
    ]
    device = environment.get("gpu") or environment.get("cpu") or "A machine without a GPU"
    is_cut = environment.get("complete") is False
    remarks = one_line(environment.get("joined") or ""), figures.isolation(environment), INCOMPLETE * is_cut
    return {
        "device": one_line(device),
        "machine": figures.machine(environment),
        "remarks": list(filter(None, remarks)),
        "date": date_of(environment).strftime("%-d %B %Y, %H:%M %Z"),
        "environment": json.dumps(environment, indent=1, ensure_ascii=False),
        "tally": [verdicts.mark(word) | {"text": text} for word, text in figures.tally(results).items()],
        "means": [
            f"{with_unit(mean, 'x')} on the {PLACES[place]}: the geometric mean, over {count} "
            f"model{'s' * (count > 1)}, of the best variant's speed-up over the best that PyTorch does"
            for place, (mean, count) in figures.geometric_means(results).items()
        ],
        "emulated": any(result["ran_on"] == "emulator" for result in results),
        "rooflines": [] if is_suite else list(_rooflines(results)),
        "models": sections,
        "ladders": [] if is_suite else list(_ladders(sections)),
        "table": suite.shown(document, sections) or verdicts.shown(sections, PLACES),
        "is_suite": is_suite,
    }


def _ladders(sections):
    """Each model's ladder for the first screen: those on GPUs first."""
    groups = [(section, group) for section in sections for group in section["groups"]]
    for section, group in sorted(groups, key=lambda pair: [*PLACES.values(), NOWHERE].index(pair[1]["place"])):
        for picture in speed_bars.pictures(group["members"], brief=True):
            svg = speed_bars.page_svg(picture, f"first-{group['id']}", f"{section['name']} on the {group['place']}")
            yield {"svg": svg, "model": section, "place": group["place"], "inputs": group["inputs"]}


def _files(result, known):
    """(model's path, variant's path) by their names, or (None, None). Of several, the one whose content is the result's."""
    names = result["model"], result["variant"]
    named = [each for each in known if (each.names or (each.model.stem, each.variant.stem)) == names]
    same = [each for each in named if not is_stale(result, each.variant, each.model)]
    return next(((each.model, each.variant) for each in same + named), (None, None))


def _rooflines(results):
    """Yield each place with its charts, one for a model and size."""
    for number, place in enumerate(dict.fromkeys(result["ran_on"] for result in results if result.get("ceilings"))):
        of_place = [result for result in results if result["ran_on"] == place]
        ceilings = next(result["ceilings"] for result in of_place if result.get("ceilings"))
        charts = []
        for (model, inputs), points in roofline.points_of(of_place).items():
            title, name = f"{model}, {inputs}", f"roof-{number}-{len(charts)}"
            if svg := roofline.chart(points, ceilings, name, f"Roofline of {title} on {PLACES[place]}"):
                charts.append({"title": title, "svg": svg})
        if charts:
            yield {"place": PLACES[place], "charts": charts}


def _model(identity, name, pairs, with_source):
    """The section of a model: a group for each place and size, then the variants. `members` are (result, what is shown)."""
    model_file, first, members, groups = next((model for _, model, _ in pairs if model), None), {}, [], {}
    for number, (result, model, path) in enumerate(pairs, 1):
        stale = path is not None and is_stale(result, path, model)
        shown = variant.shown(f"{identity}-{number}", result, path, stale, first.get(path), with_source)
        if path:
            first.setdefault(path, shown["id"])
        members.append((result, shown))
        groups.setdefault((result["ran_on"], figures.size_note(result)), []).append(members[-1])
    return {
        "id": identity,
        "name": name,
        "about": " ".join(variant.documentation(model_file).split("\n\n")[0].split()),
        "groups": [_group(f"{identity}-at-{n}", name, *key, each) for n, (key, each) in enumerate(groups.items())],
        "members": members,
        "variants": [shown for _, shown in members],
    }


def _group(identity, name, place, sizes, members):
    results = [result for result, _ in members]
    missing = {item for result in results for item in (result.get("baselines_unavailable") or {}).items()}
    ladders = []
    for number, each in enumerate(speed_bars.pictures(members)):
        svg = speed_bars.page_svg(each, f"{identity}-{number}", f"{name}, {each.title}")
        ladders.append({"title": each.title, "svg": svg})
    floors = [f"{with_unit(each['floor_ms'], ' ms')}, bound by {each['floor_bound']}" for each in results if each["floor_ms"]]
    return {
        **{"id": identity, "place": PLACES.get(place, NOWHERE), "sizes": sizes, "ladders": ladders, "members": members},
        "inputs": next(filter(None, map(figures.inputs_text, results)), ""),
        "floor": floors[0] if floors else None,
        "missing": sorted(f"{figures.baseline_name(each)} was not measured: {why}" for each, why in missing),
    }
