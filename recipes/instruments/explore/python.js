// Interprets the Python functions that portable.py exports as syntax trees: what they use of the
// language, of its builtins and of JAX, and no more. Functions take (arguments, keywords).
//
// Values: numbers, strings, booleans and null are JavaScript's. Tuples, lists and the results of
// generators are arrays, dicts are Dict, sets are PySet. Instances have their fields as properties.

class PythonError extends Error {}

const hash = (x) => {
  if (x instanceof PySet) return `{${[...x].map(hash).sort()}}`;
  if (Array.isArray(x)) return `(${x.map(hash)})`;
  return typeof x === "string" ? `"${x}"` : String(Number.isFinite(x) ? Number(x) : x);
};
const equal = (a, b) => a === b || hash(a) === hash(b);

class Dict {
  constructor(pairs = []) {
    this.items = new Map();
    for (const [key, value] of pairs) this.set(key, value);
  }
  get size() { return this.items.size; }
  has(key) { return this.items.has(hash(key)); }
  get(key, otherwise = null) { return this.has(key) ? this.items.get(hash(key))[1] : otherwise; }
  set(key, value) { this.items.set(hash(key), [this.has(key) ? this.items.get(hash(key))[0] : key, value]); }
  keys() { return [...this.items.values()].map(([key]) => key); }
  values() { return [...this.items.values()].map(([, value]) => value); }
  pairs() { return [...this.items.values()].map((pair) => [...pair]); }
  [Symbol.iterator]() { return this.keys()[Symbol.iterator](); }
}

class PySet extends Dict {
  constructor(elements = []) { super([...elements].map((x) => [x, x])); }
  add(x) { this.set(x, x); }
}

const list = (x) => (Array.isArray(x) ? x : [...x]);
const truth = (x) => (x instanceof Dict ? x.size > 0 : Array.isArray(x) ? x.length > 0 : Boolean(x));
const order = (a, b) => {
  if (!Array.isArray(a)) return a < b ? -1 : a > b ? 1 : 0;
  const at = a.findIndex((x, i) => i >= b.length || order(x, b[i]));
  return at < 0 ? a.length - b.length : at >= b.length ? 1 : order(a[at], b[at]);
};

const text = (x, quoted = false) => {
  if (typeof x === "string") return quoted ? `'${x}'` : x;
  if (Array.isArray(x)) return `[${x.map((each) => text(each, true)).join(", ")}]`;
  return x === null ? "None" : x === true ? "True" : x === false ? "False" : String(x);
};
const format = (x, how) => {
  if (how === ",") return x.toLocaleString("en-US");
  return /^\.\df$/.test(how) ? x.toFixed(Number(how[1])) : text(x);
};

const OPERATORS = {
  Add: (a, b) => (Array.isArray(a) ? [...a, ...b] : a + b),
  Sub: (a, b) => (a instanceof Dict ? new PySet([...a].filter((x) => !b.has(x))) : a - b),
  Mult: (a, b) => (Array.isArray(a) ? Array(b).fill(a).flat() : a * b),
  Div: (a, b) => a / b,
  FloorDiv: (a, b) => Math.floor(a / b),
  Mod: (a, b) => ((a % b) + b) % b,
  Pow: (a, b) => a ** b,
  BitOr: (a, b) => (a instanceof PySet ? new PySet([...a, ...b]) : new Dict([...a.pairs(), ...b.pairs()])),
  BitAnd: (a, b) => new PySet([...a].filter((x) => b.has(x))),
};
const contains = (a, b) => (typeof b === "string" ? b.includes(a) : b.has ? b.has(a) : b.some((x) => equal(x, a)));
const within = (a, b) => [...a].every((x) => b.has(x));
const COMPARISONS = {
  Eq: equal,
  NotEq: (a, b) => !equal(a, b),
  Lt: (a, b) => (a instanceof Dict ? a.size < b.size && within(a, b) : order(a, b) < 0),
  LtE: (a, b) => (a instanceof Dict ? within(a, b) : order(a, b) <= 0),
  Gt: (a, b) => order(a, b) > 0,
  GtE: (a, b) => order(a, b) >= 0,
  Is: (a, b) => a === b,
  IsNot: (a, b) => a !== b,
  In: contains,
  NotIn: (a, b) => !contains(a, b),
};

// ---- builtins, the standard library, JAX, and ours that need JAX -----------------------------------

let active = null; // the layout whose `trace` is entered

const plain = (f) => (args) => f(...args); // a function without keywords
const key = ({ key: of }) => (x) => (of ? of([x], {}) : x);
const extreme = (sign) => (args, words) => {
  const from = args.length > 1 ? args : list(args[0]);
  if (!from.length) return words.default;
  return from.reduce((a, b) => (sign * order(key(words)(b), key(words)(a)) > 0 ? b : a));
};
const product = (...lists) => lists.reduce((a, b) => a.flatMap((x) => list(b).map((y) => [...x, y])), [[]]);
const gcd = (a, b) => (b ? gcd(b, a % b) : a);
const isinstance = (x, type) => {
  if (Array.isArray(type)) return type.some((each) => isinstance(x, each));
  if (type === natives.str) return typeof x === "string";
  return type === natives.dict ? x instanceof Dict && !(x instanceof PySet) : Array.isArray(x);
};
const missing = Symbol("missing");
const natives = {
  len: plain((x) => x.length ?? x.size),
  abs: plain(Math.abs),
  sum: plain((x) => list(x).reduce((a, b) => a + b, 0)),
  any: plain((x) => list(x).some(truth)),
  all: plain((x) => list(x).every(truth)),
  max: extreme(1),
  min: extreme(-1),
  sorted: ([x], words) => [...x].sort((a, b) => order(key(words)(a), key(words)(b))),
  reversed: plain((x) => list(x).reverse()),
  zip: plain((...lists) => {
    const all = lists.map(list);
    return Array.from({ length: Math.min(...all.map((each) => each.length)) }, (_, i) => all.map((each) => each[i]));
  }),
  enumerate: plain((x) => list(x).map((each, i) => [i, each])),
  map: plain((f, ...lists) => list(lists[0]).map((_, i) => f(lists.map((each) => list(each)[i]), {}))),
  filter: plain((f, x) => list(x).filter((each) => truth(f([each], {})))),
  iter: plain(list),
  next: plain((x, otherwise) => (x.length ? x[0] : otherwise)),
  range: plain((a, b, step = 1) => {
    const [start, stop] = b === undefined ? [0, a] : [a, b];
    return Array.from({ length: Math.max(0, Math.ceil((stop - start) / step)) }, (_, i) => start + i * step);
  }),
  round: plain((x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x))),
  tuple: plain((x = []) => list(x)),
  list: plain((x = []) => [...x]),
  set: plain((x = []) => new PySet(x)),
  frozenset: plain((x = []) => new PySet(x)),
  dict: Object.assign(([x = []], words) => new Dict([...(x.pairs?.() ?? x), ...Object.entries(words)]), {
    fromkeys: plain((keys, value = null) => new Dict([...keys].map((each) => [each, value]))),
  }),
  str: plain((x) => text(x)),
  int: plain(Math.trunc),
  float: plain(Number),
  isinstance: plain(isinstance),
  hasattr: plain((x, name) => attribute(x, name, missing) !== missing),
  getattr: plain((x, name, otherwise) => attribute(x, name, otherwise)),
  repr: plain((x) => text(x, true)),
  // math, itertools, difflib, sys
  prod: plain((x) => list(x).reduce((a, b) => a * b, 1)),
  gcd: plain(gcd),
  lcm: plain((...all) => all.reduce((a, b) => (a * b) / gcd(a, b), 1)),
  ceil: plain(Math.ceil),
  floor: plain(Math.floor),
  log2: plain(Math.log2),
  product: plain(product),
  get_close_matches: plain(() => []),
  modules: new Dict(), // the name of an entry → its tables
  // JAX
  get_abstract_mesh: plain(() => active.mesh),
  get_logical_axis_rules: plain(() => active.rules.pairs()),
  devices: plain(() => [active.mesh.abstract_device]),
  dtype: plain((name) => ({ itemsize: { float32: 4, bfloat16: 2, float16: 2 }[name] })),
  AxisType: { Explicit: "Explicit" },
  PartitionSpec: plain((...axes) => axes),
  Rngs: plain(() => null),
  // ours
  UserError: plain((message) => new PythonError(message)),
  abstract_model: plain((build) => build([], {})),
  shape_of: plain((model, config) => config.shape),
  paths: plain((tree) => tree),
  trace: null, // a `with` statement enters it
  Path: null, // never reached: the page's rules are in no file
  _read: null,
};

const METHODS = {
  dict: {
    get: (x, at, otherwise) => x.get(at, otherwise),
    items: (x) => x.pairs(),
    keys: (x) => new PySet(x.keys()),
    values: (x) => x.values(),
    setdefault: (x, at, otherwise) => (x.has(at) || x.set(at, otherwise), x.get(at)),
  },
  set: { add: (x, each) => x.add(each), update: (x, more) => [...more].forEach((each) => x.add(each)) },
  array: { index: (x, each) => x.findIndex((other) => equal(each, other)), append: (x, each) => void x.push(each) },
  string: {
    join: (x, parts) => list(parts).join(x),
    startswith: (x, start) => x.startsWith(start),
    endswith: (x, end) => x.endsWith(end),
    isdigit: (x) => /^\d+$/.test(x),
    removeprefix: (x, start) => (x.startsWith(start) ? x.slice(start.length) : x),
    replace: (x, old, by) => x.replaceAll(old, by),
    rpartition: (x, by) => {
      const at = x.lastIndexOf(by);
      return at < 0 ? ["", "", x] : [x.slice(0, at), by, x.slice(at + by.length)];
    },
  },
};

function attribute(x, name, otherwise) {
  const kind = x instanceof PySet ? "set" : x instanceof Dict ? "dict" : Array.isArray(x) ? "array" : typeof x;
  if (x !== null && typeof x !== "string" && Object.hasOwn(x, name) && kind !== "dict") return x[name];
  const method = x?.ofClass?.methods[name];
  if (method) return x.ofClass.properties.includes(name) ? method([x], {}) : (args, words) => method([x, ...args], words);
  const builtin = METHODS[kind]?.[name];
  if (builtin) return (args) => builtin(x, ...args);
  if (otherwise === undefined) throw new Error(`${text(x)} has no attribute ${name}`);
  return otherwise;
}

// ---- the interpreter -----------------------------------------------------------------------------

const CONTINUE = Symbol("continue");
const BREAK = Symbol("break");

/** A function that calls those of portable.Library's definitions by their whole name. */
function interpreter(definitions) {
  const known = {};

  function global(name) {
    known[name] ??= definitions[name].def ? define(definitions[name].def, Object.create(null)) : ofClass(definitions[name]);
    return known[name];
  }

  function ofClass({ fields, defaults, methods, properties }) {
    const own = { properties, methods: {} };
    for (const [name, each] of Object.entries(methods)) own.methods[name] = define(each.def, Object.create(null));
    return (args, words) => {
      const values = fields.map((name, i) => (i < args.length ? args[i] : name in words ? words[name] : run(defaults[name], {})));
      return Object.assign([...values], Object.fromEntries(fields.map((name, i) => [name, values[i]])), { ofClass: own });
    };
  }

  function define([, , [, positionalOnly, positional, rest, keywordOnly, keywordDefaults, words, defaults], body, yields], outer) {
    const names = [...positionalOnly, ...positional].map(([, name]) => name);
    const others = keywordOnly.map(([, name]) => name);
    return (args, given) => {
      const scope = Object.assign(Object.create(outer), { "(function)": true });
      const late = names.length - defaults.length;
      names.forEach((name, i) => {
        if (i < args.length) scope[name] = args[i];
        else if (name in given) scope[name] = given[name];
        else if (i >= late) scope[name] = run(defaults[i - late], outer);
      });
      others.forEach((name, i) => (scope[name] = name in given ? given[name] : run(keywordDefaults[i], outer)));
      if (rest) scope[rest[1]] = args.slice(names.length);
      const known = [...names, ...others];
      if (words) scope[words[1]] = new Dict(Object.entries(given).filter(([name]) => !known.includes(name)));
      if (!Array.isArray(body[0])) return run(body, scope); // a lambda
      if (yields) scope["(yielded)"] = [];
      const result = block(body, scope);
      return yields ? scope["(yielded)"] : (result?.value ?? null);
    };
  }

  function block(statements, scope) {
    for (const statement of statements) {
      const end = execute(statement, scope);
      if (end) return end; // {value} of a return, CONTINUE or BREAK
    }
  }

  function assign(target, value, scope) {
    const [type, a, b] = target;
    if (type === "Name") scope[a] = value;
    else if (type === "Subscript") run(a, scope).set(run(b, scope), value);
    else {
      const values = list(value), star = a.findIndex(([kind]) => kind === "Starred");
      const after = star < 0 ? 0 : a.length - star - 1;
      a.forEach((each, i) => {
        if (star < 0 || i < star) assign(each, values[i], scope);
        else if (i === star) assign(each[1], values.slice(star, values.length - after), scope);
        else assign(each, values[values.length - (a.length - i)], scope);
      });
    }
  }

  function execute([type, a, b, c, d], scope) {
    switch (type) {
      case "Return": return { value: a ? run(a, scope) : null };
      case "Expr": return void run(a, scope);
      case "Assign": {
        const value = run(b, scope);
        return void a.forEach((target) => assign(target, value, scope));
      }
      case "AugAssign": return void assign(a, OPERATORS[b[0]](run(a, scope), run(c, scope)), scope);
      case "If": return block(truth(run(a, scope)) ? b : c, scope);
      case "For":
        for (const each of list(run(b, scope))) {
          assign(a, each, scope);
          const end = block(c, scope);
          if (end === BREAK) break;
          if (end && end !== CONTINUE) return end;
        }
        return undefined;
      case "Continue": return CONTINUE;
      case "Break": return BREAK;
      case "Raise": throw run(a, scope);
      case "FunctionDef": return void (scope[a] = define([type, a, b, c, d], scope));
      case "With": {
        const before = active;
        active = run(a[0][1][1][1], scope); // `layout.trace()`, the only context there is
        try { return block(b, scope); } finally { active = before; }
      }
      case "Match": {
        const value = run(a, scope);
        const fits = ([pattern, of]) => pattern === "MatchAs" || equal(value, run(of, scope));
        return block(b.find(([, pattern]) => fits(pattern))[3], scope);
      }
    }
    throw new Error(`python.js has no ${type}`);
  }

  function comprehend(generators, scope, each) {
    const [[, target, iterable, conditions], ...inner] = generators;
    for (const item of list(run(iterable, scope))) {
      const own = Object.create(scope);
      assign(target, item, own);
      if (!conditions.every((condition) => truth(run(condition, own)))) continue;
      if (inner.length) comprehend(inner, own, each);
      else each(own);
    }
  }

  const elements = (nodes, scope) =>
    nodes.flatMap((node) => (node[0] === "Starred" ? list(run(node[1], scope)) : [run(node, scope)]));
  const collect = (a, generators, scope) => {
    const found = [];
    comprehend(generators, scope, (own) => found.push(run(a, own)));
    return found;
  };

  function run([type, a, b, c], scope) {
    switch (type) {
      case "Constant": return a;
      case "Global": return global(a);
      case "Native": return natives[a];
      case "Name": return scope[a];
      case "Attribute": return attribute(run(a, scope), b);
      case "Call": {
        const words = {};
        for (const [, name, value] of c) {
          if (name) words[name] = run(value, scope);
          else for (const [each, its] of run(value, scope).pairs()) words[each] = its;
        }
        return run(a, scope)(elements(b, scope), words);
      }
      case "BinOp": return OPERATORS[b[0]](run(a, scope), run(c, scope));
      case "UnaryOp": return a[0] === "Not" ? !truth(run(b, scope)) : -run(b, scope);
      case "BoolOp": {
        let value;
        for (const node of b) {
          value = run(node, scope);
          if (truth(value) === (a[0] === "Or")) return value;
        }
        return value;
      }
      case "Compare": {
        let left = run(a, scope);
        return b.every(([operator], i) => {
          const right = run(c[i], scope), holds = COMPARISONS[operator](left, right);
          left = right;
          return holds;
        });
      }
      case "IfExp": return run(truth(run(a, scope)) ? b : c, scope);
      case "Subscript": {
        const of = run(a, scope);
        if (b[0] === "Slice") {
          const [from, to, step] = b.slice(1).map((node) => (node && run(node, scope)) ?? undefined);
          return step === -1 ? [...of].reverse() : of.slice(from, to);
        }
        const at = run(b, scope);
        if (of instanceof Dict && !of.has(at)) throw new Error(`no key ${text(at)}`);
        return of instanceof Dict ? of.get(at) : of.at(Number(at));
      }
      case "Tuple": case "List": return elements(a, scope);
      case "Set": return new PySet(elements(a, scope));
      case "Dict": {
        const pairs = (at, value) => (at ? [[run(at, scope), value]] : value.pairs());
        return new Dict(a.flatMap((at, i) => pairs(at, run(b[i], scope))));
      }
      case "ListComp": case "GeneratorExp": return collect(a, b, scope);
      case "SetComp": return new PySet(collect(a, b, scope));
      case "DictComp": return new Dict(collect(["Tuple", [a, b]], c, scope));
      case "Lambda": return define([type, "", a, b, false], scope);
      case "NamedExpr": {
        let own = scope; // out of comprehensions
        while (!Object.hasOwn(own, "(function)")) own = Object.getPrototypeOf(own);
        return (own[a[1]] = run(b, scope));
      }
      case "JoinedStr": return a.map((node) => run(node, scope)).join("");
      case "FormattedValue": return b === 114 ? text(run(a, scope), true) : format(run(a, scope), c ? run(c, scope) : "");
      case "Yield": return void scope["(yielded)"].push(run(a, scope));
      case "YieldFrom": return void scope["(yielded)"].push(...run(a, scope));
    }
    throw new Error(`python.js has no ${type}`);
  }

  return { call: (name, args, words = {}) => global(name)(args, words), evaluate: (node) => run(node, {}) };
}
