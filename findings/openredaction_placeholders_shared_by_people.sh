#!/usr/bin/env bash
# Guess: each address that openredaction replaces has a placeholder of its own, and restore() puts each one back in its place; what
# "[EMAIL_0730]" stands for cannot be tried without the map.
# Library: openredaction 1.0.4 (npm package of that name in the scope of that name, Node 20). Date: 2026-11-30.
# Seen: of 300 addresses in one text two share the placeholder of another, and restore() gives two people somebody else's address;
# of 1,000 it is 31. In 300 notes that are redacted one by one two people have the placeholder of another. A new process gives
# each address the same placeholder again: whoever has the redacted text can try a list of addresses, of which one in 10,000
# fits by chance.
# Why: the four digits are a hash of the value without a key, modulo 10,000, and the map keeps the last value of a placeholder.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm init -y >/dev/null
npm install --silent --no-audit --no-fund --ignore-scripts "@openredaction/openredaction@1.0.4" >/dev/null
cat >one.js <<'JS'
const { OpenRedaction } = require("@openredaction/openredaction");
console.log(new OpenRedaction().detect("Write to ann.a@example.com").redacted);
JS
cat >many.js <<'JS'
const { OpenRedaction } = require("@openredaction/openredaction");
const addresses = (count) => Array.from({ length: count }, (_, number) => `q.zork${number}@example.com`);

function countWrong(count) {
  const redaction = new OpenRedaction();
  const text = addresses(count).join("\n");
  const seen = redaction.detect(text);
  if (seen.redacted.includes("@")) process.exit(1);
  const restored = redaction.restore(seen.redacted, seen.redactionMap).split("\n");
  const wrong = addresses(count).filter((address, index) => address !== restored[index]);
  const placeholders = new Set(seen.redacted.split("\n")).size;
  console.log(`${count} addresses: ${placeholders} placeholders; ${wrong.length} come back as another person's`);
  return [placeholders, wrong.length];
}

function countJoined(count) {
  const redaction = new OpenRedaction();
  const seen = new Set();
  for (const address of addresses(count)) seen.add((redaction.detect(`Note of ${address}`)).redacted);
  console.log(`${count} notes one by one: ${seen.size} different`);
  return seen.size;
}

const seen = JSON.stringify([countWrong(50), countWrong(300), countWrong(1000), countJoined(300)]);
process.exit(seen === JSON.stringify([[50, 0], [298, 2], [969, 31], 298]) ? 0 : 1);
JS
node many.js
first=$(node one.js)
second=$(node one.js)
echo "in two processes: $first; $second"
[[ $first == "$second" && $first == "Write to [EMAIL_0730]" ]]
