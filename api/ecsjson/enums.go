package ecsjson

import (
	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/aws/smithy-go"
)

// EnumValues are the values the SDK knows for an enum shape. Schemas name the
// values of an enum only by their constants, so the types are asked. A shape
// missing here would take no value at all; a test compares with the schemas.
func EnumValues(s *smithy.Schema) []string {
	name := s.TargetID().Name
	if name == "" {
		name = s.ID().Name
	}
	return enums[name]
}

func valuesOf[E interface {
	~string
	Values() []E
}]() []string {
	var e E
	out := make([]string, 0, len(e.Values()))
	for _, v := range e.Values() {
		out = append(out, string(v))
	}
	return out
}

var enums = map[string][]string{
	"AcceleratorManufacturer":                 valuesOf[types.AcceleratorManufacturer](),
	"AcceleratorName":                         valuesOf[types.AcceleratorName](),
	"AcceleratorType":                         valuesOf[types.AcceleratorType](),
	"AccessType":                              valuesOf[types.AccessType](),
	"AgentUpdateStatus":                       valuesOf[types.AgentUpdateStatus](),
	"ApplicationProtocol":                     valuesOf[types.ApplicationProtocol](),
	"AssignPublicIp":                          valuesOf[types.AssignPublicIp](),
	"AttestationPolicyStatus":                 valuesOf[types.AttestationPolicyStatus](),
	"AutoRepairActionsStatus":                 valuesOf[types.AutoRepairActionsStatus](),
	"AvailabilityZoneRebalancing":             valuesOf[types.AvailabilityZoneRebalancing](),
	"BareMetal":                               valuesOf[types.BareMetal](),
	"BurstablePerformance":                    valuesOf[types.BurstablePerformance](),
	"CapacityOptionType":                      valuesOf[types.CapacityOptionType](),
	"CapacityProviderField":                   valuesOf[types.CapacityProviderField](),
	"CapacityProviderStatus":                  valuesOf[types.CapacityProviderStatus](),
	"CapacityProviderType":                    valuesOf[types.CapacityProviderType](),
	"CapacityProviderUpdateStatus":            valuesOf[types.CapacityProviderUpdateStatus](),
	"CapacityReservationPreference":           valuesOf[types.CapacityReservationPreference](),
	"ClusterField":                            valuesOf[types.ClusterField](),
	"ClusterSettingName":                      valuesOf[types.ClusterSettingName](),
	"Compatibility":                           valuesOf[types.Compatibility](),
	"Connectivity":                            valuesOf[types.Connectivity](),
	"ContainerCondition":                      valuesOf[types.ContainerCondition](),
	"ContainerInstanceField":                  valuesOf[types.ContainerInstanceField](),
	"ContainerInstanceStatus":                 valuesOf[types.ContainerInstanceStatus](),
	"CPUArchitecture":                         valuesOf[types.CPUArchitecture](),
	"CpuManufacturer":                         valuesOf[types.CpuManufacturer](),
	"DaemonDeploymentRollbackMonitorsStatus":  valuesOf[types.DaemonDeploymentRollbackMonitorsStatus](),
	"DaemonDeploymentStatus":                  valuesOf[types.DaemonDeploymentStatus](),
	"DaemonIpcMode":                           valuesOf[types.DaemonIpcMode](),
	"DaemonPidMode":                           valuesOf[types.DaemonPidMode](),
	"DaemonPropagateTags":                     valuesOf[types.DaemonPropagateTags](),
	"DaemonStatus":                            valuesOf[types.DaemonStatus](),
	"DaemonTaskDefinitionRevisionFilter":      valuesOf[types.DaemonTaskDefinitionRevisionFilter](),
	"DaemonTaskDefinitionStatus":              valuesOf[types.DaemonTaskDefinitionStatus](),
	"DaemonTaskDefinitionStatusFilter":        valuesOf[types.DaemonTaskDefinitionStatusFilter](),
	"DeploymentControllerType":                valuesOf[types.DeploymentControllerType](),
	"DeploymentLifecycleHookAction":           valuesOf[types.DeploymentLifecycleHookAction](),
	"DeploymentLifecycleHookStage":            valuesOf[types.DeploymentLifecycleHookStage](),
	"DeploymentLifecycleHookStatus":           valuesOf[types.DeploymentLifecycleHookStatus](),
	"DeploymentLifecycleHookTargetType":       valuesOf[types.DeploymentLifecycleHookTargetType](),
	"DeploymentRolloutState":                  valuesOf[types.DeploymentRolloutState](),
	"DeploymentStrategy":                      valuesOf[types.DeploymentStrategy](),
	"DesiredStatus":                           valuesOf[types.DesiredStatus](),
	"DeviceCgroupPermission":                  valuesOf[types.DeviceCgroupPermission](),
	"EBSResourceType":                         valuesOf[types.EBSResourceType](),
	"EFSAuthorizationConfigIAM":               valuesOf[types.EFSAuthorizationConfigIAM](),
	"EFSTransitEncryption":                    valuesOf[types.EFSTransitEncryption](),
	"EnvironmentFileType":                     valuesOf[types.EnvironmentFileType](),
	"ExecuteCommandLogging":                   valuesOf[types.ExecuteCommandLogging](),
	"ExpressCpuArchitecture":                  valuesOf[types.ExpressCpuArchitecture](),
	"ExpressGatewayServiceInclude":            valuesOf[types.ExpressGatewayServiceInclude](),
	"ExpressGatewayServiceScalingMetric":      valuesOf[types.ExpressGatewayServiceScalingMetric](),
	"ExpressGatewayServiceStatusCode":         valuesOf[types.ExpressGatewayServiceStatusCode](),
	"FirelensConfigurationType":               valuesOf[types.FirelensConfigurationType](),
	"GatewayAlbDesyncMitigationMode":          valuesOf[types.GatewayAlbDesyncMitigationMode](),
	"GatewayAlbProtocol":                      valuesOf[types.GatewayAlbProtocol](),
	"GatewayClusterAssociationStatus":         valuesOf[types.GatewayClusterAssociationStatus](),
	"GatewayConnectorHealthCheckProtocol":     valuesOf[types.GatewayConnectorHealthCheckProtocol](),
	"GatewayElbIpAddressType":                 valuesOf[types.GatewayElbIpAddressType](),
	"GatewayElbScheme":                        valuesOf[types.GatewayElbScheme](),
	"GatewayRouteStatus":                      valuesOf[types.GatewayRouteStatus](),
	"GatewayStatus":                           valuesOf[types.GatewayStatus](),
	"GpuSharingMode":                          valuesOf[types.GpuSharingMode](),
	"HealthStatus":                            valuesOf[types.HealthStatus](),
	"InstanceGeneration":                      valuesOf[types.InstanceGeneration](),
	"InstanceHealthCheckState":                valuesOf[types.InstanceHealthCheckState](),
	"InstanceHealthCheckType":                 valuesOf[types.InstanceHealthCheckType](),
	"IpcMode":                                 valuesOf[types.IpcMode](),
	"IsolationMode":                           valuesOf[types.IsolationMode](),
	"LaunchType":                              valuesOf[types.LaunchType](),
	"LocalStorage":                            valuesOf[types.LocalStorage](),
	"LocalStorageType":                        valuesOf[types.LocalStorageType](),
	"LogDriver":                               valuesOf[types.LogDriver](),
	"ManagedAgentName":                        valuesOf[types.ManagedAgentName](),
	"ManagedDraining":                         valuesOf[types.ManagedDraining](),
	"ManagedInstancesMonitoringOptions":       valuesOf[types.ManagedInstancesMonitoringOptions](),
	"ManagedResourceStatus":                   valuesOf[types.ManagedResourceStatus](),
	"ManagedScalingStatus":                    valuesOf[types.ManagedScalingStatus](),
	"ManagedTerminationProtection":            valuesOf[types.ManagedTerminationProtection](),
	"NetworkMode":                             valuesOf[types.NetworkMode](),
	"OSFamily":                                valuesOf[types.OSFamily](),
	"PidMode":                                 valuesOf[types.PidMode](),
	"PlacementConstraintType":                 valuesOf[types.PlacementConstraintType](),
	"PlacementStrategyType":                   valuesOf[types.PlacementStrategyType](),
	"PlatformDeviceType":                      valuesOf[types.PlatformDeviceType](),
	"PropagateGatewayTags":                    valuesOf[types.PropagateGatewayTags](),
	"PropagateMITags":                         valuesOf[types.PropagateMITags](),
	"PropagateTags":                           valuesOf[types.PropagateTags](),
	"ProxyConfigurationType":                  valuesOf[types.ProxyConfigurationType](),
	"ResourceManagementType":                  valuesOf[types.ResourceManagementType](),
	"ResourceType":                            valuesOf[types.ResourceType](),
	"ScaleUnit":                               valuesOf[types.ScaleUnit](),
	"SchedulingStrategy":                      valuesOf[types.SchedulingStrategy](),
	"Scope":                                   valuesOf[types.Scope](),
	"ServiceConnectAccessLoggingFormat":       valuesOf[types.ServiceConnectAccessLoggingFormat](),
	"ServiceConnectContainerLogLevel":         valuesOf[types.ServiceConnectContainerLogLevel](),
	"ServiceConnectIncludeQueryParameters":    valuesOf[types.ServiceConnectIncludeQueryParameters](),
	"ServiceDeploymentLifecycleStage":         valuesOf[types.ServiceDeploymentLifecycleStage](),
	"ServiceDeploymentRollbackMonitorsStatus": valuesOf[types.ServiceDeploymentRollbackMonitorsStatus](),
	"ServiceDeploymentStatus":                 valuesOf[types.ServiceDeploymentStatus](),
	"ServiceField":                            valuesOf[types.ServiceField](),
	"ServiceRevisionCleanup":                  valuesOf[types.ServiceRevisionCleanup](),
	"SettingName":                             valuesOf[types.SettingName](),
	"SettingType":                             valuesOf[types.SettingType](),
	"SortOrder":                               valuesOf[types.SortOrder](),
	"StabilityStatus":                         valuesOf[types.StabilityStatus](),
	"StopServiceDeploymentStopType":           valuesOf[types.StopServiceDeploymentStopType](),
	"TargetType":                              valuesOf[types.TargetType](),
	"TaskDefinitionFamilyStatus":              valuesOf[types.TaskDefinitionFamilyStatus](),
	"TaskDefinitionField":                     valuesOf[types.TaskDefinitionField](),
	"TaskDefinitionPlacementConstraintType":   valuesOf[types.TaskDefinitionPlacementConstraintType](),
	"TaskDefinitionStatus":                    valuesOf[types.TaskDefinitionStatus](),
	"TaskField":                               valuesOf[types.TaskField](),
	"TaskFilesystemType":                      valuesOf[types.TaskFilesystemType](),
	"TaskSetField":                            valuesOf[types.TaskSetField](),
	"TaskStopCode":                            valuesOf[types.TaskStopCode](),
	"ThresholdType":                           valuesOf[types.ThresholdType](),
	"TransportProtocol":                       valuesOf[types.TransportProtocol](),
	"UlimitName":                              valuesOf[types.UlimitName](),
	"VersionConsistency":                      valuesOf[types.VersionConsistency](),
}
