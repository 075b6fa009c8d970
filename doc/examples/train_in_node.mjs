// Trains a step that PieBridge's engine has written (piebridge/engine/onnx_file.py), with an inference runtime only:
//
//   npm install --ignore-scripts onnxruntime-node     (native; its scripts would fetch CUDA, which is not needed), or
//   npm install onnxruntime-web                       (WebAssembly; what a browser runs)
//   node train_in_node.mjs step.onnx state.safetensors batches.safetensors tuned.safetensors 0.01
//
// batches.safetensors: what the step calls inputs and targets (and draw/0, ... with dropout), stacked over the steps, [S, ...].
// Each step's mean loss goes to stdout; tuned.safetensors holds the state after the last.
import { readFile, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join } from "node:path";

const TYPES = { F32: ["float32", Float32Array], F64: ["float64", Float64Array], I64: ["int64", BigInt64Array],
                I32: ["int32", Int32Array], I8: ["int8", Int8Array], U8: ["uint8", Uint8Array], BOOL: ["bool", Uint8Array] };

function loadRuntime() {
  const require = createRequire(join(process.cwd(), "package.json"));  // what is installed where this is called
  for (const name of ["onnxruntime-node", "onnxruntime-web"]) {
    try {
      return [name, require(name)];
    } catch (error) {
      if (error.code !== "MODULE_NOT_FOUND") throw error;
    }
  }
  throw new Error("neither onnxruntime-node nor onnxruntime-web is installed here; npm install --ignore-scripts onnxruntime-node");
}

// {name: {type, dims, data}} of a safetensors file: the header's length (8 bytes), the header (JSON), the tensors' bytes
async function readTensors(path) {
  const bytes = await readFile(path);
  const start = 8 + Number(bytes.readBigUInt64LE(0));
  const tensors = {};
  for (const [name, entry] of Object.entries(JSON.parse(bytes.toString("utf8", 8, start)))) {
    if (name === "__metadata__") continue;
    const [type, Numbers] = TYPES[entry.dtype];
    const own = new Uint8Array(bytes.subarray(start + entry.data_offsets[0], start + entry.data_offsets[1]));
    tensors[name] = { type, dims: entry.shape, data: new Numbers(own.buffer) };
  }
  return tensors;
}

async function writeTensors(path, tensors) {
  const header = {}, parts = [];
  let position = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
    const dtype = Object.keys(TYPES).find((key) => TYPES[key][0] === type);
    header[name] = { dtype, shape: [...dims], data_offsets: [position, position + data.byteLength] };
    parts.push(Buffer.from(data.buffer, data.byteOffset, data.byteLength));
    position += data.byteLength;
  }
  const text = Buffer.from(JSON.stringify(header)), length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  await writeFile(path, Buffer.concat([length, text, ...parts]));
}

// the step-th of tensors that are stacked along the first dimension
function entryOf({ type, dims, data }, step) {
  const size = dims.slice(1).reduce((product, extent) => product * extent, 1);
  return { type, dims: dims.slice(1), data: data.slice(step * size, (step + 1) * size) };
}

const [stepPath, statePath, batchesPath, tunedPath, rate = "0.01"] = process.argv.slice(2);
if (!tunedPath) {
  console.error("usage: node train_in_node.mjs step.onnx state.safetensors batches.safetensors tuned.safetensors [rate]");
  process.exit(2);
}
const [runtimeName, { InferenceSession, Tensor, env }] = loadRuntime();
if (runtimeName === "onnxruntime-web") env.wasm.numThreads = 1;
const toTensor = ({ type, dims, data }) => new Tensor(type, data, dims);
const session = await InferenceSession.create(await readFile(stepPath));
const batches = await readTensors(batchesPath);
const state = Object.fromEntries(Object.entries(await readTensors(statePath)).map(([name, tensor]) => [name, toTensor(tensor)]));
const [steps, samples] = batches.targets.dims;
console.error(`${runtimeName}: ${steps} steps of ${samples} samples`);
for (let step = 0; step < steps; step++) {
  const given = {
    weights: { type: "float32", dims: [samples], data: new Float32Array(samples).fill(1 / samples) },  // the mean of the losses
    rate: { type: "float32", dims: [], data: Float32Array.of(Number(rate)) },
    count: { type: "float32", dims: [], data: Float32Array.of(step + 1) },
  };
  for (const name of Object.keys(batches)) given[name] = entryOf(batches[name], step);
  const feeds = Object.fromEntries(session.inputNames.map((name) => [name, state[name] ?? toTensor(given[name])]));
  const results = await session.run(feeds);
  for (const name of Object.keys(results)) if (name.startsWith("next/")) state[name.slice("next/".length)] = results[name];
  console.log(results.losses.data.reduce((sum, loss) => sum + loss, 0) / samples);
}
await writeTensors(tunedPath, state);
