// Words that map and lists share: how bytes are written, and which kinds of content have a colour of their own.

const FAMILIES = [
  { id: "gpu", label: "GPU code", kinds: ["gpu code"] },
  { id: "library", label: "shared libraries", kinds: ["shared libraries"] },
  { id: "program", label: "programs", kinds: ["programs"] },
  { id: "python", label: "Python source", kinds: ["python source"] },
  { id: "bytecode", label: "Python bytecode", kinds: ["python bytecode"] },
  { id: "model", label: "model weights", kinds: ["model weights"] },
  { id: "data", label: "other data", kinds: ["other data"] },
];
const REST = { id: "rest", label: "headers, tests, docs, caches, debug" };

function familyOf(kind) {
  return FAMILIES.find((family) => family.kinds.includes(kind)) ?? REST;
}

function bytesText(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let value = n;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return at === 0 ? `${n} B` : `${value.toFixed(2)} ${units[at]}`;
}

function shareText(n, total) {
  return total ? `${((100 * n) / total).toFixed(1)} %` : "0 %";
}
