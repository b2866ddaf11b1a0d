// What the page shows, computed by the project's own formulas from its own tables (python.js).

const DATA = JSON.parse(document.getElementById("data").textContent);
const python = interpreter(DATA.definitions);
const call = (name, args, words) => python.call(DATA.formulas[name], args, words);
function toPython(x) {
  if (Array.isArray(x)) return x.map(toPython);
  return x && typeof x === "object" ? new Dict(Object.entries(x).map(([key, value]) => [key, toPython(value)])) : x;
}

for (const [name, entry] of Object.entries(DATA.entries)) {
  entry.zoo = Object.fromEntries(Object.entries(entry.tables).map(([table, value]) => [table, toPython(value)]));
  entry.zoo.names = python.evaluate(entry.names);
  natives.modules.set(name, entry.zoo);
}

/** A model as make_layout takes it: calling it builds a model without arrays. */
function modelOf(entry, size) {
  const { weights } = DATA.entries[entry].sizes[size];
  const ofKinds = (value) => new Dict(Object.entries(weights).map(([kind, all]) => [kind, new Dict(all.map(value))]));
  const leaf = (shape, itemsize) => ({ shape, size: shape.reduce((a, b) => a * b, 1), dtype: { itemsize } });
  const shapes = ofKinds(([path, shape, , itemsize]) => [path, leaf(shape, itemsize)]);
  const abstract = { shapes, axes: ofKinds(([path, , axes]) => [path, axes]), names: DATA.entries[entry].zoo.names };
  return Object.assign(() => abstract, { __module__: entry });
}

function meshOf(axes, chip) {
  const names = Object.keys(axes), { name, platform } = DATA.chips[chip];
  return {
    shape: new Dict(Object.entries(axes)), axis_names: names, axis_types: names.map(() => "Explicit"),
    size: Object.values(axes).reduce((a, b) => a * b, 1), manual_axes: [], empty: false,
    abstract_device: { platform, device_kind: name },
  };
}

/** Reads a mesh as `describe` writes it. */
function parseMesh(text) {
  const sizes = text.split("x"), short = [, ["data"], ["data", "model"], ["data", "fsdp", "model"]][sizes.length];
  const pairs = text.includes("=") ? text.split(",").map((part) => part.split("=")) : sizes.map((size, i) => [short?.[i], size]);
  return Object.fromEntries(pairs.map(([axis, size]) => [axis, Number(size)]));
}

/** The meshes of so many devices that have the axes of a strategy, as text. */
function meshesFor(entry, strategy, count) {
  const rules = DATA.entries[entry].zoo.RULES.get(strategy);
  return [...call("meshes", [count, rules])].map((axes) => call("describe", [axes]));
}

/** The layout of a model, checked as in Python. Throws PythonError with the sentence that a recipe would print. */
function layoutOf({ entry, size, strategy, mesh, chip, batch, seq }) {
  const { config: given, accumulate = 1, offload = "" } = DATA.entries[entry].sizes[size];
  const config = Object.fromEntries(Object.entries(given).map(([name, value]) => [name, python.evaluate(value)]));
  if (config.shape.dtype && size !== "run")
    config.dtype = config.shape.dtype = DATA.chips[chip].platform === "cpu" ? "float32" : "bfloat16";
  const layout = call("make_layout", [modelOf(entry, size), config, meshOf(parseMesh(mesh), chip), strategy], {
    batch_size: batch, microbatches: accumulate, seq_len: config.shape.vocab_size ? seq : 0,
  });
  return Object.assign(layout, { accumulate, offload });
}

/** A layout of some of its model's weights. */
function restricted(layout, wanted) {
  const filtered = (all) => new Dict(all.pairs().filter(([path]) => wanted(path)));
  const some = (tree) => new Dict(tree.pairs().map(([kind, all]) => [kind, filtered(all)]));
  const { shapes, axes, names } = layout.model;
  return Object.assign([], layout, { model: { shapes: some(shapes), axes: some(axes), names } });
}

/** Everything that a device sends in a step. */
function sentBy(layout) {
  const ordered = (axes) => layout.mesh.axis_names.filter((axis) => axes.has(axis));
  const found = call("transfers", [layout, layout.accumulate]);
  return found.map(({ purpose, kind, axes, bytes }) => ({ purpose, kind, axes: ordered(axes), bytes }));
}

function memoryOf(layout) {
  return Object.fromEntries(call("memory_parts", [layout, layout.accumulate], { offload: layout.offload }).pairs());
}

/** An array's mesh axes by dim; `how`: a weight's "use" or "rest", else that of an activation. */
function specOf(layout, axes, how) {
  const { rules, uneven } = layout;
  const names = how === "use" ? axes.map((axis) => layout.model.names.in_use.get(axis, axis)) : axes;
  const skipped = how === "rest" ? uneven.keys().map((axis) => [axis, null]) : [];
  const applied = new Dict([...rules.pairs(), [null, null], ...skipped]);
  return call("partition_spec", [names, applied]).map((target) => (target === null ? [] : [target].flat()));
}

/** Each device's place along each mesh axis; devices are numbered with the last axis fastest. */
function placesOf(mesh) {
  const sizes = mesh.shape.pairs();
  return Array.from({ length: mesh.size }, (_, device) => {
    const place = {};
    let left = device;
    for (const [axis, size] of [...sizes].reverse()) [place[axis], left] = [left % size, Math.floor(left / size)];
    return place;
  });
}

/** For each device, the [start, stop) of its slice of each dim. */
function slicesOf(mesh, spec, shape) {
  return placesOf(mesh).map((place) => shape.map((dim, i) => {
    const axes = spec[i] ?? [], parts = axes.reduce((n, axis) => n * mesh.shape.get(axis), 1);
    const at = axes.reduce((n, axis) => n * mesh.shape.get(axis) + place[axis], 0), each = Math.ceil(dim / parts);
    return [Math.min(at * each, dim), Math.min((at + 1) * each, dim)];
  }));
}

/** The arrays to choose from. */
function arraysOf({ entry, size, batch, seq }) {
  const { weights, activations, cache = [] } = DATA.entries[entry].sizes[size];
  const filled = (shape) => shape.map((dim) => (dim === 0 ? batch : dim === -1 ? seq : dim));
  const named = (group, kept, label) =>
    kept.map(([axes, shape], i) => ({ id: `${group} ${i}`, group, label: label(axes, i), axes, shape: filled(shape) }));
  return [
    ...Object.values(weights).flat().map(([path, shape, axes]) => ({ id: path, group: "weight", label: path, axes, shape })),
    ...named("activation", activations, (axes) => axes.join(" × ")),
    ...named("cache", cache, (_, i) => ["keys", "values"][i]),
  ];
}
