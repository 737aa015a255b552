"""The page at `/`: type a text, see labels and timings, which device and which weights."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
HTML = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Weir: ask the model</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 44rem; margin: 2rem auto; padding: 0 1rem }
textarea { width: 100%; box-sizing: border-box; font: inherit; min-height: 5rem; padding: .5rem }
button { font: inherit; padding: .4rem 1.2rem; margin: .5rem 0 }
table { width: 100%; border-collapse: collapse }
td { padding: .2rem .4rem .2rem 0; overflow-wrap: anywhere }
td:last-child { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
meter { width: 100% }
.random { border-left: .3rem solid #c60; padding-left: .6rem }
[role=alert] { color: #c00; color: light-dark(#a00, #f99) }
</style>
<h1>Ask the model</h1>
<p id="about">Asking which model is here ...</p>
<form id="form">
  <label for="text">Text</label>
  <textarea id="text" required>Profits rose.</textarea>
  <button id="ask">Classify</button>
</form>
<p id="error" role="alert"></p>
<section id="answer" aria-live="polite" hidden>
  <table><tbody id="scores"></tbody></table>
  <p id="timing"></p>
</section>
<script>
"use strict";
const at = id => document.getElementById(id);
const ms = seconds => (1000 * seconds).toFixed(1) + " ms";

async function json(path, body) {
  const answer = await fetch(path, body && {method: "POST", body: JSON.stringify(body)});
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

async function describe() {
  const [model] = await json("/v2/repository/index");
  if (!model) throw new Error("no model is loaded yet");
  const {parameters: p} = await json("/v2/models/" + encodeURIComponent(model.name));
  at("about").textContent = `${model.name}: ${p.weights} weights (${p.weights_source}), ${p.dtype}, on ` +
    `${p.device_description}.` + 
    (p.weights === "random" ? " These weights are untrained: the answers mean nothing." : "");
  at("about").className = p.weights === "random" ? "random" : "";
}

async function ask(event) {
  event.preventDefault();
  at("error").textContent = "";
  at("ask").disabled = true;
  const begun = performance.now();
  try {
    const found = await json("/predict", {texts: [at("text").value]});
    const passed = (performance.now() - begun) / 1000;
    const [{label, scores, tokens, truncated}] = found.predictions;
    at("scores").replaceChildren(...Object.entries(scores).map(([name, score]) => {
      const row = document.createElement("tr");
      const meter = document.createElement("meter");
      meter.value = score;
      meter.setAttribute("aria-label", name);
      for (const inner of [name === label ? name + " (most likely)" : name, meter, score.toFixed(4)])
        row.appendChild(document.createElement("td")).append(inner);
      return row;
    }));
    const {wait, encode, inference} = found.timing_s;
    at("timing").textContent = `${tokens} tokens${truncated ? ", cut" : ""}; waited ${ms(wait)}, ` +
      `encoded in ${ms(encode)}, inference ${ms(inference)}, ${ms(passed)} in this browser.`;
    at("answer").hidden = false;
  } catch (error) {
    at("error").textContent = error.message;
  } finally {
    at("ask").disabled = false;
  }
}

at("form").addEventListener("submit", ask);
describe().catch(error => { at("about").textContent = "The model can't be described: " + error.message; });
</script>
</html>
"""
