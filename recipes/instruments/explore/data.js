// The page's data (figures.py), and what of a layout it describes.

const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (each) => each.charCodeAt(0));
const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
const DATA = await new Response(inflated).json();

const sum = (values) => values.reduce((a, b) => a + b, 0);
const product = (values) => values.reduce((a, b) => a * b, 1);

/** Bytes as reports format them: 1.2 MB is 1.2e6 bytes. */
function size(bytes) {
  const power = Math.max(0, Math.min(4, [1e3, 1e6, 1e9, 1e12].filter((each) => bytes >= each).length));
  return `${(bytes / 1000 ** power).toFixed(power ? 1 : 0)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

/** Reads a mesh as --mesh has it: axis → number of devices, outermost first. */
function parseMesh(text) {
  const sizes = text.split("x"), short = [, ["data"], ["data", "model"], ["data", "fsdp", "model"]][sizes.length];
  const pairs = text.includes("=") ? text.split(",").map((part) => part.split("=")) : sizes.map((size, i) => [short[i], size]);
  return Object.fromEntries(pairs.map(([axis, size]) => [axis, Number(size)]));
}

const sizeOf = ({ entry, size }) => DATA.entries[entry].sizes[size];

/** The strategies that have a mesh of so many devices, each with these meshes. */
const strategiesOf = (chosen) => sizeOf(chosen).layouts[chosen.devices];

/** A layout: its mesh, the rules that it follows, and its memory and transfers for the chosen batch, if the mesh divides it. */
function layoutOf(chosen) {
  const { entry, strategy, mesh, rows, length } = chosen, { lengths, transfers } = sizeOf(chosen);
  const { dropped, uneven, memory, sent } = strategiesOf(chosen)[strategy][mesh];
  const batch = DATA.rows.indexOf(rows) * lengths.length + Math.max(lengths.indexOf(length), 0);
  const ofBatch = (column) => (Array.isArray(column) ? column[batch] : column);
  const none = (axes) => Object.fromEntries(axes.map((axis) => [axis, null]));
  const rules = { ...DATA.entries[entry].rules[strategy], ...none(dropped) };
  const parts = Object.entries(memory).map(([name, column]) => [name, ofBatch(column)]);
  const found = Object.entries(sent).map(([i, column]) => [...transfers[i], ofBatch(column)])
    .map(([sublayer, purpose, kind, axes, bytes]) => ({ sublayer, purpose, kind, axes, bytes }));
  const divides = parts.length > 0 && parts.every(([, bytes]) => bytes !== null);
  return { mesh: parseMesh(mesh), rules, rest: { ...rules, ...none(uneven) }, divides, memory: divides ? Object.fromEntries(parts) : {},
    sent: divides ? found.filter(({ bytes }) => bytes) : [] };
}

/** An array's mesh axes by dim; `how`: a weight's "use" or "rest", else that of an activation. */
function specOf({ entry }, layout, axes, how) {
  const { in_use } = DATA.entries[entry], rules = how === "rest" ? layout.rest : layout.rules;
  return axes.map((axis) => [rules[how === "use" ? in_use[axis] ?? axis : axis] ?? []].flat());
}

/** Each device's place along each mesh axis; devices are numbered with the last axis fastest. */
function placesOf(mesh) {
  return Array.from({ length: product(Object.values(mesh)) }, (_, device) => {
    const place = {};
    let left = device;
    for (const [axis, size] of Object.entries(mesh).reverse()) [place[axis], left] = [left % size, Math.floor(left / size)];
    return place;
  });
}

/** For each device, the [start, stop) of its slice of each dim. */
function slicesOf(mesh, spec, shape) {
  return placesOf(mesh).map((place) => shape.map((dim, i) => {
    const parts = product(spec[i].map((axis) => mesh[axis])), at = spec[i].reduce((n, axis) => n * mesh[axis] + place[axis], 0);
    const each = Math.ceil(dim / parts);
    return [Math.min(at * each, dim), Math.min((at + 1) * each, dim)];
  }));
}

/** The arrays to choose from. */
function arraysOf(chosen) {
  const { weights, activations, cache } = sizeOf(chosen);
  const filled = (shape) => shape.map((dim) => (dim === 0 ? chosen.rows : dim === -1 ? chosen.length : dim));
  const named = (group, kept, label) =>
    kept.map(([axes, shape], i) => ({ id: `${group} ${i}`, group, label: label(axes, i), axes, shape: filled(shape) }));
  return [
    ...weights.map(([path, shape, axes]) => ({ id: path, group: "weight", label: path, axes, shape })),
    ...named("activation", activations, (axes) => axes.join(" × ")),
    ...named("cache", cache, (_, i) => {
      const stacks = cache.length / 2;  // more than one where layers are unlike
      return (i < stacks ? "keys" : "values") + (stacks > 1 ? ` ${(i % stacks) + 1}` : "");
    }),
  ];
}
