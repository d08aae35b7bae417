"""What the page's template shows of a run: its words and rows, section by section."""

import json

from playground.report import figures, speed_bars
from playground.report.document import is_stale
from playground.report.page import table, variant
from playground.report.text import grouped, one_line
from playground.serial import dump

PLACES = {"cuda": "GPU", "cpu": "CPU", "emulator": "emulator", None: "nowhere"}
INCOMPLETE = "the run did not come to its end: this is what was finished"
MOST_SOURCE = 200_000  # characters; of longer sources in all, only the lines around findings are on the page


def page(document, known):
    """Return everything the template needs. `known` are Files, in any order."""
    results, environment, summary = document.results, document.environment, document.suite
    names = {name: f"model-{number}" for number, name in enumerate(dict.fromkeys(each.model for each in results), 1)}
    members = list(_members(results, known, names))
    models = [_model(names[name], name, own) for name, own in grouped(members, lambda member: member[0].model).items()]
    classes = {identity: name for name, identity in names.items()}
    device = environment.gpu or environment.cpu or "A machine without a GPU"
    is_cut = environment.complete is False
    remarks = one_line(environment.joined or ""), figures.isolation(environment), INCOMPLETE * is_cut
    return {
        "device": one_line(device),
        "machine": figures.machine(environment),
        "remarks": list(filter(None, remarks)),
        "date": environment.moment.strftime("%-d %B %Y, %H:%M %Z"),
        "environment": json.dumps(dump(environment), indent=1, ensure_ascii=False),
        "tally": [variant.mark(word) | {"text": text} for word, text in figures.tally(results).items()],
        "means": [(PLACES[place], *found) for place, found in figures.geometric_means(results).items()],
        "emulated": any(result.ran_on == "emulator" for result in results),
        "models": models,
        "variants": [shown for _, shown in members],
        "ladders": [] if summary else list(_ladders(models)),
        "table": table.of_pairs(members, summary) if summary else table.of_verdicts(members, classes),
        "is_suite": bool(summary),
    }


def _members(results, known, names):
    pairs = [(result, *_files(result, known)) for result in results]
    files = {path for *_, path in pairs if path and path.is_file()}
    with_source, first = sum(path.stat().st_size for path in files) <= MOST_SOURCE, {}
    for number, (result, model, path) in enumerate(pairs, 1):
        stale = path is not None and is_stale(result, path, model)
        shown = variant.shown(f"variant-{number}", result, path, stale, first.get(path), with_source)
        if path:
            first.setdefault(path, shown["id"])
        place = PLACES[result.ran_on]
        classes = f"{names[result.model]} on-{place} {table.class_of(result)}"
        shown |= {"model": result.model, "place": place, "sizes": figures.size_note(result), "classes": classes}
        yield result, shown | {"about": " ".join(variant.documentation(model).split("\n\n")[0].split())}


def _files(result, known):
    """(model's path, variant's path) by their names, or (None, None). Of several, the one whose content is the result's."""
    names = result.model, result.variant
    named = [each for each in known if (each.names or (each.model.stem, each.variant.stem)) == names]
    same = [each for each in named if not is_stale(result, each.variant, each.model)]
    return next(((each.model, each.variant) for each in same + named), (None, None))


def _model(identity, name, members):
    groups = grouped(members, lambda member: (member[1]["place"], member[1]["sizes"])).values()
    return {
        "id": identity,
        "name": name,
        "about": next(filter(None, (shown["about"] for _, shown in members)), ""),
        "groups": [_group(f"{identity}-at-{number}", name, own) for number, own in enumerate(groups)],
        "variants": [shown for _, shown in members],
    }


def _group(identity, name, members):
    results = [result for result, _ in members]
    missing = {item for result in results for item in result.baselines_unavailable.items()}
    pictures = {f"{identity}-{number}": each for number, each in enumerate(speed_bars.pictures(members))}
    return {
        **{key: members[0][1][key] for key in ("place", "sizes")},
        **{"id": identity, "members": members, "inputs": next(filter(None, map(figures.inputs_text, results)), "")},
        "ladders": [(each.title, speed_bars.page_svg(each, key, f"{name}, {each.title}")) for key, each in pictures.items()],
        "floor": next(((each.floor_ms, each.floor_bound) for each in results if each.floor_ms), None),
        "missing": sorted(f"{figures.baseline_name(each)} was not measured: {why}" for each, why in missing),
    }


def _ladders(models):
    groups = [(model, group) for model in models for group in model["groups"]]
    for model, group in sorted(groups, key=lambda pair: list(PLACES.values()).index(pair[1]["place"])):
        for picture in speed_bars.pictures(group["members"], brief=True):
            title = f"{model['name']} on the {group['place']}"
            yield model, group, speed_bars.page_svg(picture, f"first-{group['id']}", title)
