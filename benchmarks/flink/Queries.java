import java.io.BufferedOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.concurrent.atomic.LongAdder;

import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.configuration.ConfigOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.datastream.DataStreamSink;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.legacy.RichSinkFunction;
import org.apache.flink.streaming.api.functions.source.legacy.RichParallelSourceFunction;
import org.apache.flink.streaming.api.watermark.Watermark;
import org.apache.flink.table.api.TableResult;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.table.connector.ProviderContext;
import org.apache.flink.table.connector.sink.DataStreamSinkProvider;
import org.apache.flink.table.connector.sink.DynamicTableSink;
import org.apache.flink.table.connector.source.DataStreamScanProvider;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.ScanTableSource;
import org.apache.flink.table.connector.source.abilities.SupportsSourceWatermark;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.data.binary.BinaryRowData;
import org.apache.flink.table.data.writer.BinaryRowWriter;
import org.apache.flink.table.factories.DynamicTableSinkFactory;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.table.types.logical.RowType;

/**
 * Flink SQL of {@code python -m benchmarks.flink.sql}: one query in a mini cluster of one JVM, on RocksDB, without checkpoints.
 *
 * <p>Arguments: the folder of the input, the folder for all files that the job writes, the number of batches, the start and the
 * delay of the watermark in milliseconds, the SQL of the query, the columns of its output, settings as {@code name=value;name=value}, and the
 * number of output rows after each batch, as {@code n,n,n}. Without these numbers, a batch ends when all sinks have its watermark.
 * The program prints a line of JSON for each batch: {@code {"wall_s", "cpu_s"}}. The CPU seconds are those of this process.
 *
 * <p>Input: {@code TABLE-NNN-P.bin} for batch N and source P, with rows of 24 bytes: the key, the event time in milliseconds, and
 * the amount as a double, all big-endian. Batch N is hour N. After each batch, the sources emit the end of the hour minus the
 * delay as watermark. Output: {@code output-P.bin} with one byte for the kind of
 * change, and 8 bytes for each column.
 */
public final class Queries {
    private static final int ROW_BYTES = 24;
    private static final long HOUR_MS = 3_600_000;
    private static final int SINKS = 2;
    private static final AtomicLongArray REACHED = new AtomicLongArray(SINKS);
    private static final LongAdder WRITTEN = new LongAdder();
    private static final List<DataOutputStream> OPEN = new CopyOnWriteArrayList<>();
    // Sources and sinks run in this JVM. The method main directs them by these fields.
    private static volatile int batch = -1;
    private static volatile boolean running = true;
    private static Path inputs;
    private static Path work;
    private static long startMs;
    private static long delayMs;

    /** The table factory: source and sink are the classes below. Flink finds this class by META-INF/services. */
    public static class Factory implements DynamicTableSourceFactory, DynamicTableSinkFactory {
        private static final ConfigOption<String> NAME = ConfigOptions.key("name").stringType().defaultValue("output");

        @Override
        public String factoryIdentifier() {
            return "batches";
        }

        @Override
        public Set<ConfigOption<?>> requiredOptions() {
            return new HashSet<>();
        }

        @Override
        public Set<ConfigOption<?>> optionalOptions() {
            return Set.of(NAME);
        }

        @Override
        public DynamicTableSource createDynamicTableSource(Context context) {
            String name = context.getCatalogTable().getOptions().get("name");
            return new Input(name, (RowType) context.getPhysicalRowDataType().getLogicalType());
        }

        @Override
        public DynamicTableSink createDynamicTableSink(Context context) {
            return new Output((RowType) context.getPhysicalRowDataType().getLogicalType());
        }
    }

    /** A table over the files of the input. */
    public static class Input implements ScanTableSource, SupportsSourceWatermark {
        private final String name;
        private final RowType type;

        Input(String name, RowType type) {
            this.name = name;
            this.type = type;
        }

        @Override
        public ChangelogMode getChangelogMode() {
            return ChangelogMode.insertOnly();
        }

        @Override
        public void applySourceWatermark() {}

        @Override
        public ScanRuntimeProvider getScanRuntimeProvider(ScanContext context) {
            return new DataStreamScanProvider() {
                @Override
                public DataStream<RowData> produceDataStream(ProviderContext provided, StreamExecutionEnvironment environment) {
                    return environment.addSource(new BatchFiles(name), name, InternalTypeInfo.of(type));
                }

                @Override
                public boolean isBounded() {
                    return false;
                }
            };
        }

        @Override
        public DynamicTableSource copy() {
            return new Input(name, type);
        }

        @Override
        public String asSummaryString() {
            return name;
        }
    }

    /** Emits the files of a batch when the field batch is set to its number, and then the batch's watermark. */
    public static class BatchFiles extends RichParallelSourceFunction<RowData> {
        private final String name;

        BatchFiles(String name) {
            this.name = name;
        }

        @Override
        public void run(SourceContext<RowData> context) throws Exception {
            int part = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
            int next = 0;
            while (running) {
                if (batch < next) {
                    Thread.sleep(1);
                    continue;
                }
                emit(inputs.resolve(String.format(Locale.ROOT, "%s-%03d-%d.bin", name, next, part)), context);
                context.emitWatermark(new Watermark(watermarkMs(next)));
                next++;
            }
        }

        private static void emit(Path file, SourceContext<RowData> context) throws IOException {
            try (FileChannel channel = FileChannel.open(file)) {
                ByteBuffer rows = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size());
                // One row object for all rows: with object reuse, no operator keeps the row.
                BinaryRowData row = new BinaryRowData(3);
                BinaryRowWriter writer = new BinaryRowWriter(row);
                while (rows.remaining() >= ROW_BYTES) {
                    writer.reset();
                    writer.writeLong(0, rows.getLong());
                    writer.writeTimestamp(1, TimestampData.fromEpochMillis(rows.getLong()), 3);
                    writer.writeDouble(2, rows.getDouble());
                    writer.complete();
                    context.collect(row);
                }
            }
        }

        @Override
        public void cancel() {
            running = false;
        }
    }

    /** A table that writes the output to files. */
    public static class Output implements DynamicTableSink {
        private final RowType type;

        Output(RowType type) {
            this.type = type;
        }

        @Override
        public ChangelogMode getChangelogMode(ChangelogMode requested) {
            return requested;
        }

        @Override
        public SinkRuntimeProvider getSinkRuntimeProvider(Context context) {
            return new DataStreamSinkProvider() {
                @Override
                public DataStreamSink<?> consumeDataStream(ProviderContext provided, DataStream<RowData> rows) {
                    return rows.addSink(new OutputFile(type)).setParallelism(SINKS);
                }
            };
        }

        @Override
        public DynamicTableSink copy() {
            return new Output(type);
        }

        @Override
        public String asSummaryString() {
            return "output";
        }
    }

    /** Writes one file for each task. Notes the watermark of the task. */
    public static class OutputFile extends RichSinkFunction<RowData> {
        private final RowData.FieldGetter[] fields;
        private transient DataOutputStream rows;

        OutputFile(RowType type) {
            fields = new RowData.FieldGetter[type.getFieldCount()];
            for (int at = 0; at < fields.length; at++) {
                LogicalType of = type.getTypeAt(at);
                fields[at] = RowData.createFieldGetter(of, at);
            }
        }

        private int task() {
            return getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
        }

        @Override
        public void open(org.apache.flink.api.common.functions.OpenContext context) throws IOException {
            Path file = work.resolve("output-" + task() + ".bin");
            rows = new DataOutputStream(new BufferedOutputStream(Files.newOutputStream(file), 1 << 16));
            OPEN.add(rows);
        }

        @Override
        public void invoke(RowData row, Context context) throws IOException {
            rows.writeByte(row.getRowKind().toByteValue());
            for (RowData.FieldGetter field : fields) {
                Object value = field.getFieldOrNull(row);
                if (value instanceof TimestampData) {
                    rows.writeLong(((TimestampData) value).getMillisecond());
                } else if (value instanceof Double) {
                    rows.writeDouble((Double) value);
                } else {
                    rows.writeLong(((Number) value).longValue());
                }
            }
            WRITTEN.increment();
        }

        @Override
        public void writeWatermark(org.apache.flink.api.common.eventtime.Watermark watermark) throws IOException {
            rows.flush();
            REACHED.set(task(), watermark.getTimestamp());
        }

        @Override
        public void close() throws IOException {
            rows.close();
        }
    }

    private static long watermarkMs(int number) {
        // Flink's watermark W says that no row at W follows. Cairn's rows at its watermark are late.
        return startMs + (number + 1) * HOUR_MS - delayMs - 1;
    }

    /** Waits until a batch is in the output. An interval join delays watermarks, by less than an hour. */
    private static void await(int number, String[] counts, TableResult result) throws Exception {
        long least = watermarkMs(number) - HOUR_MS;
        for (long waits = 1; !isWritten(number, counts, least); waits++) {
            Thread.sleep(1);
            if (waits % 1000 == 0 && result.getJobClient().get().getJobStatus().get().isGloballyTerminalState()) {
                result.await();
            }
        }
    }

    private static boolean isWritten(int number, String[] counts, long least) {
        if (counts.length > 1) {
            return WRITTEN.sum() >= Long.parseLong(counts[number]);
        }
        boolean all = true;
        for (int sink = 0; sink < SINKS; sink++) {
            all &= REACHED.get(sink) > least;
        }
        return all;
    }

    private static double cpuS() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime() / 1e9;
    }

    private static void run(int batches, String sql, String columns, String settings, String[] counts) throws Exception {
        Configuration configuration = new Configuration();
        String[][] given = {
            {"state.backend.type", "rocksdb"},
            {"pipeline.object-reuse", "true"},
            {"parallelism.default", "2"},
            {"pipeline.max-parallelism", "128"},
            {"restart-strategy.type", "none"},
            {"execution.buffer-timeout.interval", "100 ms"},
            {"taskmanager.numberOfTaskSlots", "2"},
            {"taskmanager.memory.managed.size", "1g"},
            {"table.local-time-zone", "UTC"},
            {"io.tmp.dirs", work.resolve("tmp").toString()},
            {"rest.port", "0"},
        };
        for (String[] setting : given) {
            configuration.setString(setting[0], setting[1]);
        }
        for (String setting : settings.split(";")) {
            if (!setting.isEmpty()) {
                configuration.setString(setting.split("=", 2)[0], setting.split("=", 2)[1]);
            }
        }
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.createLocalEnvironment(configuration);
        environment.setParallelism(2);
        StreamTableEnvironment tables = StreamTableEnvironment.create(environment);
        for (String name : new String[] {"a", "b"}) {
            tables.executeSql("CREATE TABLE " + name + " (id BIGINT NOT NULL, `at` TIMESTAMP(3), amount DOUBLE NOT NULL, "
                    + "arrived AS PROCTIME(), WATERMARK FOR `at` AS SOURCE_WATERMARK()) "
                    + "WITH ('connector' = 'batches', 'name' = '" + name + "')");
        }
        tables.executeSql("CREATE TABLE output (" + columns + ") WITH ('connector' = 'batches')");
        String insert = "INSERT INTO output " + sql;
        System.err.println(tables.explainSql(insert));
        TableResult result = tables.executeSql(insert);
        for (int number = 0; number < batches; number++) {
            long beganNs = System.nanoTime();
            double cpuS = cpuS();
            batch = number;
            await(number, counts, result);
            System.out.printf(Locale.ROOT, "{\"wall_s\": %.6f, \"cpu_s\": %.6f, \"rows\": %d}%n",
                    (System.nanoTime() - beganNs) / 1e9, cpuS() - cpuS, WRITTEN.sum());
            System.out.flush();
        }
        // The job is not ended: at its end, Flink would put out all open windows.
        for (DataOutputStream rows : OPEN) {
            rows.flush();
        }
    }

    public static void main(String[] arguments) throws Exception {
        inputs = Path.of(arguments[0]);
        work = Path.of(arguments[1]);
        startMs = Long.parseLong(arguments[3]);
        delayMs = Long.parseLong(arguments[4]);
        Files.createDirectories(work.resolve("tmp"));
        for (int sink = 0; sink < SINKS; sink++) {
            REACHED.set(sink, Long.MIN_VALUE);
        }
        try {
            run(Integer.parseInt(arguments[2]), arguments[5], arguments[6], arguments[7], arguments[8].split(","));
        } catch (Throwable failure) {
            failure.printStackTrace();
            System.exit(1);
        }
        System.exit(0);
    }
}
