import java.io.BufferedOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileVisitResult;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.SimpleFileVisitor;
import java.nio.file.attribute.BasicFileAttributes;
import java.util.HashSet;
import java.util.Locale;
import java.util.Set;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.LongAdder;

import org.apache.flink.api.common.JobID;
import org.apache.flink.api.common.JobStatus;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.core.execution.RecoveryClaimMode;
import org.apache.flink.core.execution.SavepointFormatType;
import org.apache.flink.runtime.execution.ExecutionState;
import org.apache.flink.runtime.executiongraph.AccessExecution;
import org.apache.flink.runtime.executiongraph.AccessExecutionJobVertex;
import org.apache.flink.runtime.executiongraph.AccessExecutionVertex;
import org.apache.flink.runtime.jobgraph.JobGraph;
import org.apache.flink.runtime.jobgraph.SavepointRestoreSettings;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.runtime.minicluster.MiniClusterConfiguration;
import org.apache.flink.runtime.state.FunctionInitializationContext;
import org.apache.flink.runtime.state.FunctionSnapshotContext;
import org.apache.flink.streaming.api.checkpoint.CheckpointedFunction;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.sink.legacy.RichSinkFunction;
import org.apache.flink.streaming.api.functions.source.legacy.RichParallelSourceFunction;
import org.apache.flink.util.Collector;

/**
 * The Flink job of {@code python -m benchmarks.flink}: the same updates as Cairn's, on RocksDB in a mini cluster of one JVM.
 *
 * <p>Arguments: the folder of the input, the folder for all files that the job writes, the number of batches, and the number of
 * repeats of each restore and savepoint. The program prints a line of JSON for each step: {@code {"step", "wall_s", "cpu_s",
 * "written_mb", ...}}. The CPU seconds are those of this process.
 *
 * <p>Input: {@code NNN-P.bin} for batch N and source P, with rows of 80 bytes: key and value as big-endian longs, and 64 bytes of
 * payload. All rows of a key are in the files of one source, so their order is kept. At the end, the state of every key is written
 * to {@code rows-STEP-TASK.bin}, with 112 bytes for each key: key, n, total, low, high, last, payload.
 */
public final class Updates {
    private static final int ROW_BYTES = 80;
    private static final int PAYLOAD_BYTES = 64;
    private static final LongAdder PROCESSED = new LongAdder();
    private static final AtomicInteger WAITING = new AtomicInteger();
    // Sources and functions run in this JVM. The method run below directs them by these fields.
    private static volatile int batch = -1;
    private static volatile String reading;
    private static Path inputs;
    private static Path work;

    public static class Update {
        public long k;
        public long v;
        public String payload;
    }

    public static class Kept {
        public long n;
        public long total;
        public long low;
        public long high;
        public long last;
        public String payload;
    }

    public static class Output {
        public long k;
        public long n;
        public long total;
    }

    /** Emits the files of a batch when the field batch is set to its number. Files of earlier batches are never emitted again. */
    public static class BatchFiles extends RichParallelSourceFunction<Update> {
        private volatile boolean running = true;

        @Override
        public void run(SourceContext<Update> context) throws Exception {
            int part = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
            int parts = getRuntimeContext().getTaskInfo().getNumberOfParallelSubtasks();
            int next = batch + 1;
            WAITING.incrementAndGet();
            while (running) {
                if (batch < next) {
                    Thread.sleep(1);
                    continue;
                }
                for (int file = part; file < 2; file += parts) {
                    emit(inputs.resolve(String.format(Locale.ROOT, "%03d-%d.bin", next, file)), context);
                }
                next++;
            }
        }

        private static void emit(Path file, SourceContext<Update> context) throws IOException {
            try (FileChannel channel = FileChannel.open(file)) {
                ByteBuffer rows = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size());
                byte[] payload = new byte[PAYLOAD_BYTES];
                while (rows.remaining() >= ROW_BYTES) {
                    Update update = new Update();
                    update.k = rows.getLong();
                    update.v = rows.getLong();
                    rows.get(payload);
                    update.payload = new String(payload, StandardCharsets.ISO_8859_1);
                    context.collect(update);
                }
            }
        }

        @Override
        public void cancel() {
            running = false;
        }
    }

    /** Count, sum, lowest, highest and last value, and the last payload. While the field reading is set, writes each key's state to a file. */
    public static class Merge extends KeyedProcessFunction<Long, Update, Output> {
        private transient ValueState<Kept> state;
        private transient DataOutputStream rows;

        @Override
        public void open(OpenContext context) {
            state = getRuntimeContext().getState(new ValueStateDescriptor<>("state", Kept.class));
        }

        @Override
        public void processElement(Update update, Context context, Collector<Output> out) throws Exception {
            Kept kept = state.value();
            if (reading != null) {
                write(update.k, kept);
            } else {
                if (kept == null) {
                    kept = new Kept();
                    kept.low = 1L << 62;
                    kept.high = -(1L << 62);
                }
                kept.n++;
                kept.total += update.v;
                kept.low = Math.min(kept.low, update.v);
                kept.high = Math.max(kept.high, update.v);
                kept.last = update.v;
                kept.payload = update.payload;
                state.update(kept);
                Output output = new Output();
                output.k = update.k;
                output.n = kept.n;
                output.total = kept.total;
                out.collect(output);
            }
            PROCESSED.increment();
        }

        private void write(long k, Kept kept) throws IOException {
            if (rows == null) {
                int task = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
                rows = new DataOutputStream(new BufferedOutputStream(
                        Files.newOutputStream(work.resolve("rows-" + reading + "-" + task + ".bin")), 1 << 16));
            }
            for (long field : new long[] {k, kept.n, kept.total, kept.low, kept.high, kept.last}) {
                rows.writeLong(field);
            }
            rows.write(kept.payload.getBytes(StandardCharsets.ISO_8859_1));
        }

        @Override
        public void close() throws IOException {
            if (rows != null) {
                rows.close();
            }
        }
    }

    /** Writes output rows of 24 bytes to one file for each task, and flushes the file at each checkpoint. */
    public static class OutputFile extends RichSinkFunction<Output> implements CheckpointedFunction {
        private transient DataOutputStream rows;

        @Override
        public void open(OpenContext context) throws IOException {
            Path file = Files.createTempFile(Files.createDirectories(work.resolve("output")), "output-", ".bin");
            rows = new DataOutputStream(new BufferedOutputStream(Files.newOutputStream(file), 1 << 16));
        }

        @Override
        public void invoke(Output output, Context context) throws IOException {
            rows.writeLong(output.k);
            rows.writeLong(output.n);
            rows.writeLong(output.total);
        }

        @Override
        public void snapshotState(FunctionSnapshotContext context) throws IOException {
            rows.flush();
        }

        @Override
        public void initializeState(FunctionInitializationContext context) {}

        @Override
        public void close() throws IOException {
            if (rows != null) {
                rows.close();
            }
        }
    }

    private final MiniCluster cluster;
    private final Configuration settings;
    private JobID job;
    private Set<Path> known = new HashSet<>();

    private Updates() throws Exception {
        settings = new Configuration();
        String[][] given = {
            {"state.backend.type", "rocksdb"},
            {"state.backend.rocksdb.use-ingest-db-restore-mode", "true"},
            {"execution.checkpointing.incremental", "true"},
            {"execution.checkpointing.storage", "filesystem"},
            {"execution.checkpointing.dir", work.resolve("checkpoints").toUri().toString()},
            {"execution.checkpointing.externalized-checkpoint-retention", "RETAIN_ON_CANCELLATION"},
            // The program triggers each checkpoint itself, so periodic checkpoints are practically off.
            {"execution.checkpointing.interval", "30 d"},
            {"execution.buffer-timeout.interval", "5 ms"},
            {"pipeline.object-reuse", "true"},
            {"restart-strategy.type", "none"},
            // The memory that a task manager of the distribution's default size gives to RocksDB.
            {"taskmanager.memory.managed.size", "512m"},
            {"io.tmp.dirs", work.resolve("tmp").toString()},
            {"rest.port", "0"},
        };
        for (String[] setting : given) {
            settings.setString(setting[0], setting[1]);
        }
        cluster = new MiniCluster(new MiniClusterConfiguration.Builder()
                .setConfiguration(settings).setNumTaskManagers(1).setNumSlotsPerTaskManager(2).withRandomPorts().build());
        cluster.start();
    }

    /** Starts the job, from the given checkpoint or savepoint or from empty state; returns when the sources wait for a batch. */
    private void start(int parallelism, String from) throws Exception {
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(settings);
        environment.setParallelism(parallelism);
        environment.setMaxParallelism(128);
        environment.addSource(new BatchFiles()).uid("source")
                .keyBy(update -> update.k, Types.LONG)
                .process(new Merge()).uid("merge")
                .addSink(new OutputFile()).uid("output");
        JobGraph graph = environment.getStreamGraph().getJobGraph();
        if (from != null) {
            graph.setSavepointRestoreSettings(SavepointRestoreSettings.forPath(from, false, RecoveryClaimMode.NO_CLAIM));
        }
        WAITING.set(0);
        job = cluster.submitJob(graph).get().getJobID();
        // A source that starts after the field batch was set would skip that batch. A task is RUNNING before its source starts.
        while (!allRun() || WAITING.get() < parallelism) {
            Thread.sleep(2);
        }
    }

    private boolean allRun() throws Exception {
        if (cluster.getJobStatus(job).get() == JobStatus.FAILED) {
            throw new IllegalStateException(cluster.getArchivedExecutionGraph(job).get().getFailureInfo().getExceptionAsString());
        }
        boolean all = true;
        for (AccessExecutionVertex vertex : cluster.getExecutionGraph(job).get().getAllExecutionVertices()) {
            all &= vertex.getExecutionState() == ExecutionState.RUNNING;
        }
        return all;
    }

    /** Returns the milliseconds that the slowest task took to initialise; a task opens its state in this time. */
    private long initialisedMs() throws Exception {
        long longest = 0;
        for (AccessExecutionJobVertex vertex : cluster.getExecutionGraph(job).get().getAllVertices().values()) {
            for (AccessExecutionVertex task : vertex.getTaskVertices()) {
                AccessExecution tried = task.getCurrentExecutionAttempt();
                longest = Math.max(longest, tried.getStateTimestamp(ExecutionState.RUNNING)
                        - tried.getStateTimestamp(ExecutionState.INITIALIZING));
            }
        }
        return longest;
    }

    private void cancel() throws Exception {
        cluster.cancelJob(job).get();
        cluster.requestJobResult(job).get();
    }

    /** Lets the sources emit a batch, waits until all its rows are in the state, and returns the number of rows. */
    private long process(int number) throws Exception {
        long rows = 0;
        for (int part = 0; part < 2; part++) {
            rows += Files.size(inputs.resolve(String.format(Locale.ROOT, "%03d-%d.bin", number, part))) / ROW_BYTES;
        }
        long until = PROCESSED.sum() + rows;
        batch = number;
        while (PROCESSED.sum() < until) {
            Thread.sleep(1);
        }
        return rows;
    }

    /** Returns the megabytes in checkpoint files that are new since the last call. */
    private double writtenMb() throws IOException {
        Set<Path> there = new HashSet<>();
        LongAdder bytes = new LongAdder();
        // Flink deletes the previous checkpoint meanwhile. A file that vanishes during this walk is an old file, so skip it.
        Files.walkFileTree(Files.createDirectories(work.resolve("checkpoints")), new SimpleFileVisitor<>() {
            @Override
            public FileVisitResult visitFile(Path file, BasicFileAttributes attributes) {
                there.add(file);
                bytes.add(known.contains(file) ? 0 : attributes.size());
                return FileVisitResult.CONTINUE;
            }

            @Override
            public FileVisitResult visitFileFailed(Path file, IOException gone) {
                return FileVisitResult.CONTINUE;
            }

            @Override
            public FileVisitResult postVisitDirectory(Path folder, IOException gone) {
                return FileVisitResult.CONTINUE;
            }
        });
        known = there;
        return bytes.sum() / 1e6;
    }

    /** Writes every key's state to {@code rows-NAME-TASK.bin} and ends the job. The batch {@code every} has every key once. */
    private void read(String name, int every) throws Exception {
        reading = name;
        process(every);
        cancel();
        reading = null;
        batch = every - 1;
    }

    private static void tell(String step, double wallS, double cpuS, String more) {
        System.out.printf(Locale.ROOT, "{\"step\": \"%s\", \"wall_s\": %.6f, \"cpu_s\": %.6f%s}%n", step, wallS, cpuS, more);
    }

    private static double cpuS() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime() / 1e9;
    }

    private static double nowS() {
        return System.nanoTime() / 1e9;
    }

    private void run(int batches, int repeats) throws Exception {
        String checkpoint = null;
        start(2, null);
        for (int number = 0; number <= batches; number++) {
            double beganS = nowS();
            double cpuS = cpuS();
            long rows = process(number);
            double processedS = nowS();
            checkpoint = cluster.triggerCheckpoint(job).get();
            double endedS = nowS();
            tell("batch", endedS - beganS, cpuS() - cpuS, String.format(Locale.ROOT,
                    ", \"rows\": %d, \"checkpoint_s\": %.6f, \"written_mb\": %.6f", rows, endedS - processedS, writtenMb()));
        }
        String savepoint = null;
        for (int repeat = 0; repeat < repeats; repeat++) {
            double beganS = nowS();
            double cpuS = cpuS();
            savepoint = cluster.triggerSavepoint(
                    job, work.resolve("savepoints").toUri().toString(), false, SavepointFormatType.CANONICAL).get();
            tell("take canonical", nowS() - beganS, cpuS() - cpuS, "");
        }
        read("end", batches + 1);
        Object[][] restores = {
            {"restore 2 to 2", 2, checkpoint}, {"restore 2 to 1", 1, checkpoint}, {"restore canonical", 2, savepoint},
        };
        for (int repeat = 0; repeat < repeats; repeat++) {
            for (Object[] restore : restores) {
                double beganS = nowS();
                double cpuS = cpuS();
                start((Integer) restore[1], (String) restore[2]);
                tell((String) restore[0], initialisedMs() / 1e3, cpuS() - cpuS,
                        String.format(Locale.ROOT, ", \"until_running_s\": %.6f", nowS() - beganS));
                if (repeat == repeats - 1) {
                    read(((String) restore[0]).replace(' ', '-'), batches + 1);
                } else {
                    cancel();
                }
            }
        }
        cluster.close();
    }

    public static void main(String[] arguments) throws Exception {
        inputs = Path.of(arguments[0]);
        work = Path.of(arguments[1]);
        Files.createDirectories(work.resolve("tmp"));
        try {
            new Updates().run(Integer.parseInt(arguments[2]), Integer.parseInt(arguments[3]));
        } catch (Throwable failure) {
            // Exit explicitly: the cluster's threads keep the process alive after its main thread has ended.
            failure.printStackTrace();
            System.exit(1);
        }
        System.exit(0);
    }
}
