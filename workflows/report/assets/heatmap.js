// Heatmap: hover a cell for its row, its column and its value.

DRAW.heatmap = (host, data) => {
  const values = decode(data.values);
  const [low, high] = extent(values.values);
  const colours = scale(data.low ?? low, data.high ?? high, data.diverging);
  const numeric = (labels) => labels.every(isNumber);
  const least = !numeric(data.columns) ? 17 : data.columns.length > 40 ? 6 : 9;
  const height = numeric(data.rows) && data.rows.length > 40 ? 6 : 20;
  const long = data.rows.length > 16, square = long && data.rows.length === data.columns.length;
  const exact = (row, column) => told(values.at(row, column), data.unit, values.digits);
  grid(host, {
    name: `${data.value_name} by ${data.row_name} and ${data.column_name}`,
    rows: data.rows,
    columns: data.columns,
    upward: data.upward,
    cell(room) {
      const width = within(room, data.columns.length, least, long ? 26 : 56);
      const fair = Math.max(height, Math.min(width, Math.floor(520 / data.rows.length)));
      return { width: square ? Math.min(width, Math.max(least, fair)) : width, height: long ? fair : 28 };
    },
    fill: (row, column) => (Number.isNaN(values.at(row, column)) ? null : colours.fill(values.at(row, column))),
    blocks: data.framed,
    tip: (row, column) => [
      make("div", { class: "what" }, exact(row, column), " ", make("small", {}, data.value_name)),
      make("div", { class: "where" }, `${data.row_name} `, token(data.rows[row]), ` · ${data.column_name} `, token(data.columns[column]),
        isNumber(data.columns[column]) ? "" : ` (${column})`),
    ],
    say: (row, column) => `${data.row_name} ${data.rows[row]}, ${data.column_name} ${data.columns[column]}: ${exact(row, column)}`,
  });
  host.append(make("div", { class: "legend" }, ramp(colours, data.value_name, data.unit),
    make("span", {}, `${data.upward ? "up" : "down"}: ${data.row_name} · across: ${data.column_name}`),
    data.frame_name ? make("span", { class: "framed" }, data.frame_name) : null));
};
